// Typed errors of the native core; bind/ turns each kind into the Python class of the same name.
#pragma once

#include <stdexcept>
#include <string>

namespace moestro {

enum class ErrorKind { kInvalidRequest, kUnsupportedOp, kUnsupportedFormat, kCheckpoint, kStorage };

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

inline Error invalid_request(const std::string& message) {
  return Error(ErrorKind::kInvalidRequest, message);
}

}  // namespace moestro

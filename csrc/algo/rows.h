// How many leading rows of a buffer are live, read when an op runs.
#pragma once

#include <cstdint>
#include <string>

#include "core/error.h"

namespace moestro {

class Rows {
 public:
  Rows(const int32_t* count, int64_t capacity) : count_(count), capacity_(capacity) {}

  int64_t get() const {
    const int64_t n = *count_;
    if (n < 0 || n > capacity_)
      throw invalid_request("row count " + std::to_string(n) + " is outside 0.." +
                            std::to_string(capacity_));
    return n;
  }
  int64_t capacity() const { return capacity_; }

 private:
  const int32_t* count_;
  int64_t capacity_;
};

}  // namespace moestro

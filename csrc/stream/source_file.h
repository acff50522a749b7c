// A file to read blocks of: opened past the page cache where that can be, and watched for changes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moestro {

// What tells a file from another one, or from itself after it was written to.
struct Identity {
  uint64_t device = 0, inode = 0;
  int64_t size = 0, modified_ns = 0;
  bool operator==(const Identity&) const = default;
};

class SourceFile {
 public:
  // Throws Error(kStorage) naming the path if it is no regular file that can be read.
  SourceFile(const std::string& path, bool direct);
  SourceFile(const SourceFile&) = delete;
  SourceFile& operator=(const SourceFile&) = delete;
  ~SourceFile();

  const std::string& path() const { return path_; }
  int fd() const { return fds_.back(); }
  const Identity& identity() const { return identity_; }
  // Why the page cache is used; empty if it is not.
  const std::string& buffered() const { return buffered_; }
  // How the file differs from what was opened; empty if it does not.
  std::string change() const;
  // Goes on through the page cache after an unbuffered read was refused; false if it was buffered
  // already or cannot be opened again.
  bool leave_direct(const std::string& why);

 private:
  const std::string path_;
  std::vector<int> fds_;  // the last is in use, reads of others may be in flight
  Identity identity_;
  std::string buffered_;
};

// Reads a block into an aligned buffer of 4096 bytes; 0 or errno.
int read_block(int fd, int64_t offset, std::byte* to);

}  // namespace moestro

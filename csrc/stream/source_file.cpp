#include "stream/source_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <system_error>

#include "core/error.h"

namespace moestro {
namespace {

constexpr size_t kBlock = 4096;

Error failed(const std::string& path, const char* what, int error) {
  return Error(ErrorKind::kStorage,
               path + ": cannot " + what + ": " + std::generic_category().message(error));
}

Identity identity_of(const struct stat& s) {
  return {uint64_t(s.st_dev), uint64_t(s.st_ino), int64_t(s.st_size),
          int64_t(s.st_mtim.tv_sec) * 1000000000 + s.st_mtim.tv_nsec};
}

// From <linux/magic.h>, those that are known to refuse.
std::string file_system(int fd) {
  struct statfs s = {};
  if (fstatfs(fd, &s) != 0) return "the file system";
  switch (static_cast<unsigned long>(s.f_type)) {
    case 0x01021994:
      return "tmpfs";
    case 0x794c7630:
      return "overlayfs";
    case 0x65735546:
      return "this FUSE file system";
  }
  return "the file system";
}

int open_at(const std::string& path, int flags) {
  int fd;
  do {
    fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | flags);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

}  // namespace

int read_block(int fd, int64_t offset, std::byte* to) {
  for (size_t got = 0; got < kBlock;) {
    const ssize_t n = pread(fd, to + got, kBlock - got, off_t(offset + int64_t(got)));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    if (n == 0) return ENODATA;
    got += size_t(n);
  }
  return 0;
}

SourceFile::SourceFile(const std::string& path, bool direct) : path_(path) {
  int fd = direct ? open_at(path, O_DIRECT) : -1;
  if (direct && fd < 0 && errno != EINVAL && errno != EOPNOTSUPP) throw failed(path, "open", errno);
  const bool refused = direct && fd < 0;
  if (fd < 0) fd = open_at(path, 0);
  if (fd < 0) throw failed(path, "open", errno);
  fds_.push_back(fd);
  struct stat s = {};
  if (fstat(fd, &s) != 0 || !S_ISREG(s.st_mode)) {
    const Error error = S_ISDIR(s.st_mode) ? failed(path, "read it", EISDIR)
                                           : failed(path, "read it as a file", ENODEV);
    close(fd);
    throw error;
  }
  identity_ = identity_of(s);
  if (refused) buffered_ = file_system(fd) + " cannot read past the page cache";
  if (!direct) buffered_ = "asked for";
  if (refused || !direct) {
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
    return;
  }
  // Some file systems open, but then refuse to read.
  alignas(kBlock) std::byte block[kBlock];
  if (identity_.size >= int64_t(kBlock) && read_block(fd, 0, block) == EINVAL)
    leave_direct("refuses to read past the page cache");
}

SourceFile::~SourceFile() {
  for (const int fd : fds_) close(fd);
}

std::string SourceFile::change() const {
  struct stat s = {};
  if (fstat(fd(), &s) != 0) return "its state cannot be read";
  const Identity now = identity_of(s);
  if (now == identity_) return "";
  if (now.size != identity_.size)
    return "its size has changed from " + std::to_string(identity_.size) + " to " +
           std::to_string(now.size) + " bytes since it was opened";
  return "it has been written to since it was opened";
}

bool SourceFile::leave_direct(const std::string& why) {
  if (!buffered_.empty()) return false;
  const int fd = open_at(path_, 0);
  if (fd < 0) return false;
  struct stat s = {};
  if (fstat(fd, &s) != 0 || identity_of(s) != identity_) {
    close(fd);
    return false;
  }
  posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
  buffered_ = file_system(fd) + " " + why;
  fds_.push_back(fd);
  return true;
}

}  // namespace moestro

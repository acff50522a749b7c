// How pieces get to the drives and back: io_uring, or a pool of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace moestro {

struct QueuedRead {
  int fd;
  int64_t offset, bytes;
  std::byte* to;
  void* tag;
};

struct Completion {
  void* tag;
  int64_t result;  // bytes read, or -errno
};

class ReadQueue {
 public:
  virtual ~ReadQueue() = default;  // once nothing is in flight
  virtual const char* name() const = 0;
  // Takes a read; the caller sees to it that no more are in flight than the queue was made for.
  virtual void issue(const QueuedRead& read) = 0;
  // Begins what was taken since the last call. What cannot begin goes to `refused`.
  virtual void flush(std::vector<Completion>& refused) = 0;
  // Appends what has ended; if `block`, waits until something has, or a signal came. For one thread
  // at a time, which may differ from the one that issues.
  virtual void reap(std::vector<Completion>& ended, bool block) = 0;
};

// `refusal` says why the system has no io_uring for us (then the result is null).
std::unique_ptr<ReadQueue> make_uring_queue(int pieces, std::string& refusal);
std::unique_ptr<ReadQueue> make_pread_queue(int threads);

}  // namespace moestro

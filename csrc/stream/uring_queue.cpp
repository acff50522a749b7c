// A ReadQueue over io_uring, by system calls alone.
//
// Issuing happens under the reader's lock; reap() may run beside it in another thread. The two
// share no field: the submission ring belongs to the one, the completion ring to the other.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>

#include "core/error.h"
#include "stream/read_queue.h"
#include "stream/uring_abi.h"

namespace moestro {
namespace {

using namespace uring;

// How often to try again, a millisecond apart, when the kernel is short of memory.
constexpr int kTries = 1000;

int enter(int ring, uint32_t submit, uint32_t wait) {
  const long result =
      syscall(kEnter, ring, submit, wait, wait > 0 ? kEnterGetEvents : 0u, nullptr, 0);
  return result < 0 ? -errno : int(result);
}

class Mapping {
 public:
  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (base_ != MAP_FAILED) munmap(base_, nbytes_);
  }
  // 0 or errno. Not for children: a fork must not take part in its parent's ring.
  int map(int ring, size_t nbytes, uint64_t offset) {
    nbytes_ = nbytes;
    base_ = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring,
                 off_t(offset));
    if (base_ == MAP_FAILED) return errno;
    return madvise(base_, nbytes, MADV_DONTFORK) == 0 ? 0 : errno;
  }
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(base_) + offset);
  }

 private:
  void* base_ = MAP_FAILED;
  size_t nbytes_ = 0;
};

class UringQueue final : public ReadQueue {
 public:
  ~UringQueue() override {
    if (ring_ >= 0) close(ring_);
  }

  // Empty, or why it cannot be.
  std::string open(int pieces) {
    Params params = {};
    params.flags = kSetupCompletionSize;
    params.cq_entries = 2 * uint32_t(pieces);
    const long ring = syscall(kSetup, uint32_t(pieces), &params);
    if (ring < 0) return refusal(errno);
    ring_ = int(ring);
    constexpr uint32_t kNeeded = kFeatureSingleMap | kFeatureNoDrop | kFeatureCurrentPosition;
    if ((params.features & kNeeded) != kNeeded) return "the kernel is older than Linux 5.6";
    const size_t ring_nbytes = std::max(params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                                        params.cq_off.cqes + params.cq_entries * sizeof(Entry));
    int error = rings_.map(ring_, ring_nbytes, kOffsetSubmissionRing);
    if (error == 0)
      error = entries_.map(ring_, params.sq_entries * sizeof(Submission), kOffsetEntries);
    if (error != 0) return "its rings cannot be mapped: " + std::generic_category().message(error);
    sq_tail_ = rings_.at<uint32_t>(params.sq_off.tail);
    sq_mask_ = *rings_.at<uint32_t>(params.sq_off.ring_mask);
    cq_head_ = rings_.at<uint32_t>(params.cq_off.head);
    cq_tail_ = rings_.at<uint32_t>(params.cq_off.tail);
    cq_mask_ = *rings_.at<uint32_t>(params.cq_off.ring_mask);
    cqes_ = rings_.at<Entry>(params.cq_off.cqes);
    uint32_t* array = rings_.at<uint32_t>(params.sq_off.array);
    for (uint32_t i = 0; i < params.sq_entries; ++i) array[i] = i;
    return round_trip();
  }

  const char* name() const override { return "io_uring"; }

  void issue(const QueuedRead& read) override {
    // A length of more than a piece never comes here, and 2 GiB is the most a system call reads.
    put({.opcode = kOpRead,
         .flags = 0,
         .ioprio = 0,
         .fd = read.fd,
         .offset = uint64_t(read.offset),
         .address = reinterpret_cast<uint64_t>(read.to),
         .length = uint32_t(read.bytes),
         .rw_flags = 0,
         .user_data = reinterpret_cast<uint64_t>(read.tag),
         .rest = {}});
  }

  void flush(std::vector<Completion>& refused) override {
    for (int tries = 0; unsubmitted_ > 0;) {
      const int result = enter(ring_, unsubmitted_, 0);
      if (result > 0) unsubmitted_ -= uint32_t(result);
      if (result > 0 || result == -EINTR) continue;
      if ((result == 0 || result == -EAGAIN || result == -EBUSY) && ++tries < kTries) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        continue;
      }
      // What the kernel has not taken is taken back.
      const uint32_t tail = *sq_tail_ - unsubmitted_;
      for (uint32_t i = 0; i < unsubmitted_; ++i)
        refused.push_back(
            {reinterpret_cast<void*>(entry(tail + i).user_data), result == 0 ? -EBUSY : result});
      __atomic_store_n(sq_tail_, tail, __ATOMIC_RELEASE);
      unsubmitted_ = 0;
    }
  }

  void reap(std::vector<Completion>& ended, bool block) override {
    if (take(ended) || !block) return;
    const int result = enter(ring_, 0, 1);
    if (result < 0 && result != -EINTR)
      // Never seen to happen; better slow than spinning.
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    take(ended);
  }

 private:
  static std::string refusal(int error) {
    if (error == ENOSYS) return "the kernel has no io_uring";
    if (error == EPERM || error == EACCES)
      return "io_uring is forbidden here (a seccomp filter, or the sysctl "
             "kernel.io_uring_disabled)";
    return "io_uring cannot be set up: " + std::generic_category().message(error);
  }

  Submission& entry(uint32_t position) { return entries_.at<Submission>(0)[position & sq_mask_]; }

  void put(const Submission& submission) {
    const uint32_t tail = *sq_tail_;
    entry(tail) = submission;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    ++unsubmitted_;
  }

  bool take(std::vector<Completion>& ended) {
    uint32_t head = *cq_head_;
    const uint32_t tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
    if (head == tail) return false;
    for (; head != tail; ++head) {
      const Entry& e = cqes_[head & cq_mask_];
      ended.push_back({reinterpret_cast<void*>(e.user_data), e.result});
    }
    __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
    return true;
  }

  // A filter may allow the set-up and then refuse to enter.
  std::string round_trip() {
    Submission nop = {};
    nop.opcode = kOpNop;
    put(nop);
    std::vector<Completion> ended;
    int result;
    do {
      result = enter(ring_, unsubmitted_, 1);
    } while (result == -EINTR);
    if (result < 0) return refusal(-result);
    unsubmitted_ = 0;
    return take(ended) ? "" : "io_uring completes nothing here";
  }

  int ring_ = -1;
  Mapping rings_, entries_;
  uint32_t* sq_tail_ = nullptr;
  uint32_t* cq_head_ = nullptr;
  uint32_t* cq_tail_ = nullptr;
  uint32_t sq_mask_ = 0, cq_mask_ = 0;
  Entry* cqes_ = nullptr;
  uint32_t unsubmitted_ = 0;
};

}  // namespace

std::unique_ptr<ReadQueue> make_uring_queue(int pieces, std::string& refusal) {
  auto queue = std::make_unique<UringQueue>();
  refusal = queue->open(pieces);
  if (!refusal.empty()) return nullptr;
  return queue;
}

}  // namespace moestro

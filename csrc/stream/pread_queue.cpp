// A ReadQueue of threads that each read one piece at a time, and sleep while there is none.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "core/error.h"
#include "stream/read_queue.h"

namespace moestro {
namespace {

// While it lives, threads that are started do not take signals, which are for others to handle.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

class PreadQueue final : public ReadQueue {
 public:
  explicit PreadQueue(int threads) {
    const SignalsBlocked blocked;
    for (int i = 0; i < threads; ++i) {
      try {
        threads_.emplace_back([this] { run(); });
      } catch (const std::system_error& error) {
        if (threads_.empty())
          throw Error(ErrorKind::kStorage,
                      std::string("no thread to read files can be started: ") + error.what());
        break;  // fewer do as well, at a lower rate
      }
    }
  }

  ~PreadQueue() override {
    {
      const std::lock_guard lock(mutex_);
      stops_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  const char* name() const override { return "pread"; }

  void issue(const QueuedRead& read) override {
    {
      const std::lock_guard lock(mutex_);
      reads_.push_back(read);
    }
    work_.notify_one();
  }

  void flush(std::vector<Completion>&) override {}

  void reap(std::vector<Completion>& ended, bool block) override {
    std::unique_lock lock(mutex_);
    if (block) come_.wait(lock, [this] { return !ended_.empty(); });
    ended.insert(ended.end(), ended_.begin(), ended_.end());
    ended_.clear();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return stops_ || !reads_.empty(); });
      if (reads_.empty()) return;
      const QueuedRead read = reads_.front();
      reads_.pop_front();
      lock.unlock();
      const ssize_t got = pread(read.fd, read.to, size_t(read.bytes), off_t(read.offset));
      const int64_t result = got < 0 ? -int64_t(errno) : int64_t(got);
      lock.lock();
      ended_.push_back({read.tag, result});
      come_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable work_, come_;
  std::deque<QueuedRead> reads_;
  std::vector<Completion> ended_;
  bool stops_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<ReadQueue> make_pread_queue(int threads) {
  return std::make_unique<PreadQueue>(threads);
}

}  // namespace moestro

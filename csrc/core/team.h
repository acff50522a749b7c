// The thread team: one per process, the caller is worker 0.
//
// A job is SPMD: every worker runs the same body and meets the others at barriers. Inside a job
// workers spin between phases (a fork-join through futex costs tens of microseconds, a spin a tenth
// of one); between jobs they spin for about a millisecond and then park, so an idle process uses no
// CPU. An exception in any worker releases all the others from their barriers and reaches the
// caller.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace moestro {

class Team;

// One worker's view of a running job.
class Worker {
 public:
  static constexpr size_t kScratchBytes = size_t{1} << 20;
  static constexpr size_t kSharedBytes = size_t{16} << 20;

  Worker(Team& team, int index, std::byte* scratch)
      : team_(team), index_(index), scratch_(scratch) {}

  int index() const { return index_; }
  int count() const;
  bool lead() const { return index_ == 0; }
  // Private 64-byte aligned memory of kScratchBytes, valid within one phase.
  std::byte* scratch() const { return scratch_; }
  // Memory of kSharedBytes that all workers share, 64-byte aligned, uninitialized, valid within one
  // op. Its pages are committed only where touched.
  std::byte* shared() const;

  // All workers must call it; on return the writes of all before it are visible.
  void barrier();

  // Claims tasks 0..n-1 from a shared counter; f(task). All workers must call it with the same n.
  // Ends with a barrier.
  template <class F>
  void for_tasks(int64_t n, F&& f) {
    std::atomic<int64_t>& counter = next_counter();
    for (;;) {
      const int64_t task = counter.fetch_add(1, std::memory_order_relaxed);
      if (task >= n) break;
      f(task);
    }
    barrier();
  }

 private:
  std::atomic<int64_t>& next_counter();

  Team& team_;
  int index_;
  uint64_t phase_ = 0;
  std::byte* scratch_;
};

class Job {
 public:
  virtual void run(Worker& worker) = 0;

 protected:
  ~Job() = default;
};

class Team {
 public:
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }
  void run(Job& job);

 private:
  friend class Worker;
  struct Released {};  // thrown out of a barrier when another worker has failed
  static constexpr int kCounters = 4;
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };

  void work(int index);
  void stop();
  void run_as(int index, Job& job);
  void wait_at_barrier();

  const int size_;
  std::vector<std::thread> threads_;
  std::unique_ptr<std::byte[]> scratch_;
  std::byte* scratch_base_ = nullptr;
  std::unique_ptr<std::byte[]> shared_;
  std::byte* shared_base_ = nullptr;
  Job* job_ = nullptr;
  bool stopping_ = false;
  Counter counters_[kCounters];
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> parked_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<bool> failed_{false};
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
};

// The process's team, made on first use. A forked child gets a new one. Jobs of all callers run one
// after the other, also across a change of set_process_threads().
std::shared_ptr<Team> process_team();
void set_process_threads(int threads);
int process_threads();

template <class F>
void run_on_team(F&& body) {
  struct Body final : Job {
    F& f;
    explicit Body(F& f) : f(f) {}
    void run(Worker& worker) override { f(worker); }
  } job(body);
  process_team()->run(job);
}

}  // namespace moestro

// The thread team: one per process, the caller is worker 0.
//
// A job is SPMD: every worker runs the same body and meets the others at barriers. Inside a job
// workers spin between phases (a fork-join through futex costs tens of microseconds, a spin a tenth
// of one); between jobs they spin for about a millisecond and then park, so an idle process uses no
// CPU. An exception in any worker releases all the others from their barriers and reaches the
// caller.
//
// Workers belong to NUMA nodes, consecutive ones to the same. Output channels are sliced between
// nodes, so that weights are read only from local memory; tasks are claimed only within a node.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace moestro {

class Team;

// Where the workers of a team belong. Both lists have one entry per worker.
struct TeamLayout {
  std::vector<int> node;               // 0..nodes-1, ascending, none left out
  std::vector<std::vector<int>> cpus;  // logical CPUs it is kept on; empty: any

  // Workers that may run anywhere, all on one node.
  static TeamLayout unplaced(int threads);
  bool operator==(const TeamLayout&) const = default;
};

// Consecutive steps [first, end).
struct Slice {
  int64_t first, end;
  int64_t size() const { return end - first; }
};

// One worker's view of a running job.
class Worker {
 public:
  static constexpr size_t kScratchBytes = size_t{1} << 20;
  static constexpr size_t kSharedBytes = size_t{16} << 20;

  Worker(Team& team, int index, int node, std::byte* scratch)
      : team_(team), index_(index), node_(node), scratch_(scratch) {}

  int index() const { return index_; }
  int count() const;
  bool lead() const { return index_ == 0; }
  // The part of `steps` steps of output channels that this worker's node computes.
  Slice slice(int64_t steps) const;
  // Workers of this worker's node.
  int node_count() const;
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
    std::atomic<int64_t>& counter = next_counter(0);
    for (;;) {
      const int64_t task = counter.fetch_add(1, std::memory_order_relaxed);
      if (task >= n) break;
      f(task);
    }
    barrier();
  }

  // Claims ranges of 0..n-1 among the workers of this worker's node; f(first, end). At most `most`
  // long, and ever shorter towards the end, so that all finish at about the same time. n and `most`
  // may depend on the node. All workers of the team must call it. Ends with a barrier.
  template <class F>
  void for_node_ranges(int64_t n, int64_t most, F&& f) {
    std::atomic<int64_t>& counter = next_counter(node_);
    const int64_t shares = 3 * int64_t{node_count()};
    for (int64_t first = counter.load(std::memory_order_relaxed); first < n;) {
      const int64_t share = (n - first) / shares;
      const int64_t end = first + (share < 1 ? 1 : share < most ? share : most < 1 ? 1 : most);
      if (!counter.compare_exchange_weak(first, end, std::memory_order_relaxed)) continue;
      f(first, end);
      first = counter.load(std::memory_order_relaxed);
    }
    barrier();
  }

 private:
  std::atomic<int64_t>& next_counter(int node);

  Team& team_;
  int index_;
  int node_;
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
  explicit Team(TeamLayout layout);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }
  const TeamLayout& layout() const { return layout_; }
  // Why workers are not on their CPUs; empty if they are.
  const std::string& placement_problem() const { return placement_problem_; }
  void run(Job& job);

 private:
  friend class Worker;
  struct Released {};  // thrown out of a barrier when another worker has failed
  static constexpr int kCounters = 4;
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };

  void start(int index);
  void work(int index);
  void stop();
  void run_as(int index, Job& job);
  void wait_at_barrier();

  const TeamLayout layout_;
  const int size_;
  const int nodes_;
  std::vector<int> first_worker_;  // of each node, and size_
  std::string placement_problem_;
  std::vector<std::thread> threads_;
  std::unique_ptr<std::byte[]> scratch_;
  std::byte* scratch_base_ = nullptr;
  std::unique_ptr<std::byte[]> shared_;
  std::byte* shared_base_ = nullptr;
  Job* job_ = nullptr;
  bool stopping_ = false;
  std::vector<Counter> counters_;  // [kCounters][nodes]
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
// after the other, also across a change of layout.
std::shared_ptr<Team> process_team();
void set_process_layout(TeamLayout layout);
void set_process_threads(int threads);  // unplaced
int process_threads();
// What each node of the process's team computes of `steps` steps of output channels.
std::vector<Slice> process_slices(int64_t steps);

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

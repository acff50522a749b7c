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
  int node() const { return node_; }
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
    next_claims();
    std::atomic<int64_t>& counter = claims(0);
    for (;;) {
      const int64_t task = counter.fetch_add(1, std::memory_order_relaxed);
      if (task >= n) break;
      f(task);
    }
    barrier();
  }

  // Claims ranges of 0..n-1 among the workers of this worker's node; f(first, end), each at most
  // `most` long. A worker goes through its own share from the front, three quarters of what is left
  // at a time, and then takes half of what the fullest share has left, from its back. So each reads
  // few long runs of memory (where a run ends, what the hardware has prefetched beyond it is
  // wasted: workers that take turns at neighbouring 36 KB get half the bandwidth), and all finish
  // at about the same time. n < 2^31; n and `most` may depend on the node. All workers of the team
  // must call it. Ends with a barrier.
  template <class F>
  void for_node_ranges(int64_t n, int64_t most, F&& f) {
    next_claims();
    if (most < 1) most = 1;
    for (Slice r = claim_own(n, most); r.size() > 0; r = claim_own(n, most)) f(r.first, r.end);
    for (Slice r = claim_other(n, most); r.size() > 0; r = claim_other(n, most)) f(r.first, r.end);
    barrier();
  }

 private:
  // Begins a phase.
  void next_claims();
  // What has been claimed of worker `index`'s share in this phase.
  std::atomic<int64_t>& claims(int index);
  // Worker `index`'s share of n steps of this worker's node.
  Slice share_of(int64_t n, int index) const;
  Slice claim_own(int64_t n, int64_t most);
  Slice claim_other(int64_t n, int64_t most);

  Team& team_;
  int index_;
  int node_;
  uint64_t phase_ = 0;  // phases begun
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
  static constexpr int kPhases = 4;
  struct alignas(64) Claims {
    std::atomic<int64_t> value{0};
  };

  void start(int index);
  void work(int index);
  void stop();
  void run_as(int index, Job& job);
  void wait_at_barrier();

  const TeamLayout layout_;
  const int size_;
  std::vector<int> first_worker_;  // of each node, and size_
  std::string placement_problem_;
  std::vector<std::thread> threads_;
  std::unique_ptr<std::byte[]> scratch_;
  std::byte* scratch_base_ = nullptr;
  std::unique_ptr<std::byte[]> shared_;
  std::byte* shared_base_ = nullptr;
  Job* job_ = nullptr;
  bool stopping_ = false;
  std::vector<Claims> claims_;  // [kPhases][workers]
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

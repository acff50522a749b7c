#include "core/team.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <utility>

#include "core/affinity.h"
#include "core/error.h"
#include "core/pause.h"

namespace moestro {
namespace {

// Beyond this many spins the peer has probably lost its core: let the scheduler run it.
constexpr int kSpinsBeforeYield = 256;
constexpr auto kIdleBeforePark = std::chrono::microseconds(1000);

thread_local bool inside_job = false;

// One job at a time in the whole process, whatever team runs it: ops keep state between phases.
std::mutex run_mutex;
std::mutex process_mutex;

// A mutex that another thread holds while this one forks would stay locked in the child for ever.
const int fork_handlers = pthread_atfork(
    [] {
      run_mutex.lock();
      process_mutex.lock();
    },
    [] {
      process_mutex.unlock();
      run_mutex.unlock();
    },
    [] {
      process_mutex.unlock();
      run_mutex.unlock();
    });

std::byte* aligned(const std::unique_ptr<std::byte[]>& memory) {
  return reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) &
                                      ~uintptr_t{63});
}

Slice slice_of(int64_t steps, const std::vector<int>& first_worker, int node) {
  const int64_t threads = first_worker.back();
  return {steps * first_worker[size_t(node)] / threads,
          steps * first_worker[size_t(node) + 1] / threads};
}

// Index of the first worker of each node, and the number of all.
std::vector<int> first_workers(const std::vector<int>& node) {
  std::vector<int> first;
  for (size_t i = 0; i < node.size(); ++i)
    if (i == 0 || node[i] != node[i - 1]) first.push_back(int(i));
  first.push_back(int(node.size()));
  return first;
}

// Steps of a share that are taken, counted from its two ends.
struct Claimed {
  int64_t front, back;
  explicit Claimed(int64_t packed) : front(packed & 0x7fffffff), back(packed >> 32) {}
  Claimed(int64_t front, int64_t back) : front(front), back(back) {}
  int64_t packed() const { return front | back << 32; }
};

TeamLayout checked(TeamLayout layout) {
  const size_t threads = layout.node.size();
  if (threads < 1 || threads > 1024)
    throw invalid_request("threads must be between 1 and 1024, got " + std::to_string(threads));
  if (layout.cpus.size() != threads) throw invalid_request("each thread needs its list of CPUs");
  for (size_t i = 0; i < threads; ++i) {
    const int before = i == 0 ? 0 : layout.node[i - 1];
    if (layout.node[i] != before && (i == 0 || layout.node[i] != before + 1))
      throw invalid_request("the nodes of threads must ascend from 0 without gaps");
  }
  return layout;
}

}  // namespace

TeamLayout TeamLayout::unplaced(int threads) {
  const size_t n = threads < 1 ? 0 : size_t(threads);
  return {std::vector<int>(n, 0), std::vector<std::vector<int>>(n)};
}

int Worker::count() const { return team_.size(); }

Slice Worker::slice(int64_t steps) const { return slice_of(steps, team_.first_worker_, node_); }

int Worker::node_count() const {
  return team_.first_worker_[size_t(node_) + 1] - team_.first_worker_[size_t(node_)];
}

std::byte* Worker::shared() const { return team_.shared_base_; }

void Worker::barrier() { team_.wait_at_barrier(); }

void Worker::next_claims() {
  // What is reset here was last used kPhases - 1 phases ago, and a barrier lies between this and
  // its next use.
  ++phase_;
  const uint64_t next = (phase_ + 1) % Team::kPhases * uint64_t(team_.size_) + uint64_t(index_);
  team_.claims_[next].value.store(0, std::memory_order_relaxed);
}

std::atomic<int64_t>& Worker::claims(int index) {
  return team_.claims_[phase_ % Team::kPhases * uint64_t(team_.size_) + uint64_t(index)].value;
}

Slice Worker::share_of(int64_t n, int index) const {
  const int64_t i = index - team_.first_worker_[size_t(node_)], count = node_count();
  return {n * i / count, n * (i + 1) / count};
}

Slice Worker::claim_own(int64_t n, int64_t most) {
  const Slice share = share_of(n, index_);
  std::atomic<int64_t>& mine = claims(index_);
  int64_t value = mine.load(std::memory_order_relaxed);
  for (;;) {
    const Claimed claimed(value);
    const int64_t left = share.size() - claimed.front - claimed.back;
    if (left <= 0) return {0, 0};
    const int64_t count = std::min((3 * left + 3) / 4, most), first = share.first + claimed.front;
    if (mine.compare_exchange_weak(value, Claimed(claimed.front + count, claimed.back).packed(),
                                   std::memory_order_relaxed))
      return {first, first + count};
  }
}

Slice Worker::claim_other(int64_t n, int64_t most) {
  for (;;) {
    int fullest = -1;
    int64_t value = 0, left = 0;
    const int first = team_.first_worker_[size_t(node_)];
    for (int i = first; i < first + node_count(); ++i) {
      const int64_t now = claims(i).load(std::memory_order_relaxed);
      const Claimed claimed(now);
      const int64_t rest = share_of(n, i).size() - claimed.front - claimed.back;
      if (rest > left) fullest = i, value = now, left = rest;
    }
    if (fullest < 0) return {0, 0};
    const Claimed claimed(value);
    const int64_t count = std::min((left + 1) / 2, most);
    const int64_t end = share_of(n, fullest).end - claimed.back;
    if (claims(fullest).compare_exchange_strong(
            value, Claimed(claimed.front, claimed.back + count).packed(),
            std::memory_order_relaxed))
      return {end - count, end};
  }
}

Team::Team(TeamLayout layout)
    : layout_(checked(std::move(layout))),
      size_(int(layout_.node.size())),
      first_worker_(first_workers(layout_.node)),
      claims_(size_t(kPhases) * size_t(size_)) {
  const auto threads = size_t(size_);
  scratch_.reset(new std::byte[threads * Worker::kScratchBytes + 64]);
  scratch_base_ = aligned(scratch_);
  std::memset(scratch_base_, 0, threads * Worker::kScratchBytes);
  shared_.reset(new std::byte[Worker::kSharedBytes + 64]);
  shared_base_ = aligned(shared_);
  threads_.reserve(threads - 1);
  try {
    for (int i = 1; i < size_; ++i) start(i);
  } catch (const std::system_error& error) {
    const size_t started = threads_.size() + 1;
    stop();
    throw invalid_request("the system started only " + std::to_string(started) + " of " +
                          std::to_string(threads) + " threads: " + error.what());
  }
}

void Team::start(int index) {
  threads_.emplace_back([this, index] { work(index); });
  const pthread_t thread = threads_.back().native_handle();
  pthread_setname_np(thread, ("moestro-" + std::to_string(index)).c_str());
  const std::vector<int>& cpus = layout_.cpus[size_t(index)];
  if (cpus.empty()) return;
  if (const int error = keep_on(thread, cpus); error != 0)
    placement_problem_ = "thread " + std::to_string(index) + " cannot be kept on CPU " +
                         std::to_string(cpus[0]) + ": " + std::strerror(error);
}

Team::~Team() { stop(); }

void Team::stop() {
  stopping_ = true;
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::wait_at_barrier() {
  if (size_ == 1) return;
  const uint32_t generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    return;
  }
  int spins = 0;
  while (generation_.load(std::memory_order_acquire) == generation) {
    if (failed_.load(std::memory_order_relaxed)) throw Released{};
    if (++spins < kSpinsBeforeYield) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

void Team::run_as(int index, Job& job) {
  Worker worker(*this, index, layout_.node[size_t(index)],
                scratch_base_ + size_t(index) * Worker::kScratchBytes);
  inside_job = true;
  try {
    job.run(worker);
  } catch (const Released&) {
  } catch (...) {
    const std::lock_guard lock(failure_mutex_);
    if (!failure_) failure_ = std::current_exception();
    failed_.store(true, std::memory_order_release);
  }
  inside_job = false;
}

void Team::run(Job& job) {
  if (inside_job) throw invalid_request("a team job was started from inside a team job");
  const std::lock_guard lock(run_mutex);
  for (auto& claims : claims_) claims.value.store(0, std::memory_order_relaxed);
  arrived_.store(0, std::memory_order_relaxed);
  failed_.store(false, std::memory_order_relaxed);
  failure_ = nullptr;
  job_ = &job;
  running_.store(size_ - 1, std::memory_order_relaxed);
  epoch_.fetch_add(1);
  if (parked_.load() > 0) epoch_.notify_all();
  if (const auto& cpus = layout_.cpus[0]; !cpus.empty()) move_to(cpus);
  run_as(0, job);
  for (int spins = 0; running_.load(std::memory_order_acquire) > 0; ++spins) {
    if (spins < kSpinsBeforeYield) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
  // Handed over, not kept: its last owner is the thread that catches it.
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Team::work(int index) {
  uint32_t seen = 0;
  for (;;) {
    const auto idle_since = std::chrono::steady_clock::now();
    for (int spins = 0; epoch_.load(std::memory_order_acquire) == seen; ++spins) {
      pause();
      if (spins % 64 != 63) continue;
      if (std::chrono::steady_clock::now() - idle_since < kIdleBeforePark) continue;
      parked_.fetch_add(1);
      epoch_.wait(seen);
      parked_.fetch_sub(1);
    }
    seen = epoch_.load(std::memory_order_acquire);
    if (stopping_) return;
    run_as(index, *job_);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

namespace {
// Never destroyed at exit: threads may be parked.
TeamLayout& wanted_layout = *new TeamLayout(TeamLayout::unplaced(1));
std::shared_ptr<Team>* current_team = nullptr;
pid_t team_pid = 0;
}  // namespace

std::shared_ptr<Team> process_team() {
  const std::lock_guard lock(process_mutex);
  const pid_t pid = getpid();
  // Threads do not survive fork: the parent's object is left untouched in the child.
  if (current_team == nullptr || team_pid != pid) current_team = new std::shared_ptr<Team>();
  if (*current_team == nullptr || (*current_team)->layout() != wanted_layout)
    *current_team = std::make_shared<Team>(wanted_layout);
  team_pid = pid;
  return *current_team;
}

void set_process_layout(TeamLayout layout) {
  layout = checked(std::move(layout));
  const std::lock_guard lock(process_mutex);
  wanted_layout = std::move(layout);
}

void set_process_threads(int threads) {
  if (threads < 1)
    throw invalid_request("threads must be between 1 and 1024, got " + std::to_string(threads));
  set_process_layout(TeamLayout::unplaced(threads));
}

int process_threads() {
  const std::lock_guard lock(process_mutex);
  return int(wanted_layout.node.size());
}

std::vector<Slice> process_slices(int64_t steps) {
  const std::lock_guard lock(process_mutex);
  const std::vector<int> first = first_workers(wanted_layout.node);
  std::vector<Slice> slices;
  for (int n = 0; n + 1 < int(first.size()); ++n) slices.push_back(slice_of(steps, first, n));
  return slices;
}

}  // namespace moestro

#include "core/team.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <system_error>

#include "core/error.h"

namespace moestro {
namespace {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

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

}  // namespace

int Worker::count() const { return team_.size(); }

std::byte* Worker::shared() const { return team_.shared_base_; }

void Worker::barrier() { team_.wait_at_barrier(); }

std::atomic<int64_t>& Worker::next_counter() {
  // The counter of the next phase was last used kCounters - 1 phases ago, and a barrier lies
  // between this reset and its next use.
  const uint64_t phase = phase_++;
  if (index_ == 0)
    team_.counters_[(phase + 1) % Team::kCounters].value.store(0, std::memory_order_relaxed);
  return team_.counters_[phase % Team::kCounters].value;
}

Team::Team(int threads) : size_(threads) {
  if (threads < 1 || threads > 1024)
    throw invalid_request("threads must be between 1 and 1024, got " + std::to_string(threads));
  scratch_.reset(new std::byte[size_t(threads) * Worker::kScratchBytes + 64]);
  scratch_base_ = aligned(scratch_);
  std::memset(scratch_base_, 0, size_t(threads) * Worker::kScratchBytes);
  shared_.reset(new std::byte[Worker::kSharedBytes + 64]);
  shared_base_ = aligned(shared_);
  threads_.reserve(threads - 1);
  try {
    for (int i = 1; i < threads; ++i) threads_.emplace_back([this, i] { work(i); });
  } catch (const std::system_error& error) {
    const size_t started = threads_.size() + 1;
    stop();
    throw invalid_request("the system started only " + std::to_string(started) + " of " +
                          std::to_string(threads) + " threads: " + error.what());
  }
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
  Worker worker(*this, index, scratch_base_ + size_t(index) * Worker::kScratchBytes);
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
  for (auto& counter : counters_) counter.value.store(0, std::memory_order_relaxed);
  arrived_.store(0, std::memory_order_relaxed);
  failed_.store(false, std::memory_order_relaxed);
  failure_ = nullptr;
  job_ = &job;
  running_.store(size_ - 1, std::memory_order_relaxed);
  epoch_.fetch_add(1);
  if (parked_.load() > 0) epoch_.notify_all();
  run_as(0, job);
  for (int spins = 0; running_.load(std::memory_order_acquire) > 0; ++spins) {
    if (spins < kSpinsBeforeYield) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
  if (failure_) std::rethrow_exception(failure_);
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
int wanted_threads = 1;
std::shared_ptr<Team>* current_team = nullptr;  // never destroyed at exit: threads may be parked
pid_t team_pid = 0;
}  // namespace

std::shared_ptr<Team> process_team() {
  const std::lock_guard lock(process_mutex);
  const pid_t pid = getpid();
  // Threads do not survive fork: the parent's object is left untouched in the child.
  if (current_team == nullptr || team_pid != pid) current_team = new std::shared_ptr<Team>();
  if (*current_team == nullptr || (*current_team)->size() != wanted_threads)
    *current_team = std::make_shared<Team>(wanted_threads);
  team_pid = pid;
  return *current_team;
}

void set_process_threads(int threads) {
  if (threads < 1 || threads > 1024)
    throw invalid_request("threads must be between 1 and 1024, got " + std::to_string(threads));
  const std::lock_guard lock(process_mutex);
  wanted_threads = threads;
}

int process_threads() {
  const std::lock_guard lock(process_mutex);
  return wanted_threads;
}

}  // namespace moestro

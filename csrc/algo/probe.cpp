#include "algo/probe.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>

#include "core/error.h"
#include "core/memory.h"
#include "core/team.h"
#include "isa/dispatch.h"

namespace moestro {
namespace {

constexpr int kPasses = 3;
constexpr int64_t kChunk = int64_t{1} << 20;
constexpr int64_t kRounds = 400'000;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The probe's memory, touched once and kept: probes interleave with what they are compared to.
class ProbeMemory {
 public:
  const uint8_t* get(int64_t nbytes) {
    if (nbytes == nbytes_) return reinterpret_cast<const uint8_t*>(base_);
    if (base_ != nullptr) free_pages(base_, size_t(nbytes_));
    nbytes_ = 0;
    base_ = allocate_pages(size_t(nbytes));
    if (base_ == nullptr)
      throw invalid_request("no memory for a probe of " + std::to_string(nbytes) + " bytes");
    std::memset(base_, 1, size_t(nbytes));
    nbytes_ = nbytes;
    return reinterpret_cast<const uint8_t*>(base_);
  }
  std::mutex mutex;

 private:
  std::byte* base_ = nullptr;
  int64_t nbytes_ = 0;
};

ProbeMemory memory;
std::atomic<uint64_t> sink;

template <class F>
double operations_per_second(F kernel) {
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    std::atomic<int64_t> done{0};
    const auto start = std::chrono::steady_clock::now();
    run_on_team([&](Worker& worker) {
      done.fetch_add(kernel(kRounds));
      worker.barrier();
    });
    best = std::max(best, 2.0 * static_cast<double>(done.load()) / seconds_since(start));
  }
  return best;
}

}  // namespace

double probe_read(int64_t nbytes) {
  if (nbytes < kChunk) throw invalid_request("a read probe needs at least 1 MiB");
  const std::lock_guard lock(memory.mutex);
  const uint8_t* base = memory.get(nbytes);
  const auto read = isa().matrix.read_bytes;
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    run_on_team([&](Worker& worker) {
      worker.for_tasks(nbytes / kChunk, [&](int64_t i) {
        sink.fetch_xor(read(base + i * kChunk, kChunk), std::memory_order_relaxed);
      });
    });
    best = std::max(best, static_cast<double>(nbytes / kChunk * kChunk) / seconds_since(start));
  }
  return best;
}

double probe_dot() { return operations_per_second(isa().matrix.dot_peak); }
double probe_fma() { return operations_per_second(isa().matrix.fma_peak); }
double probe_bf16() { return operations_per_second(isa().matrix.bf16_peak); }

}  // namespace moestro

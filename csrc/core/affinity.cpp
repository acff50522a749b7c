#include "core/affinity.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

namespace moestro {
namespace {

// A CPU mask of any size, as the kernel may have more CPUs than cpu_set_t has bits.
class Mask {
 public:
  static constexpr int kCpus = 8192;
  Mask() : set_(CPU_ALLOC(kCpus)), nbytes_(CPU_ALLOC_SIZE(kCpus)) { CPU_ZERO_S(nbytes_, set_); }
  ~Mask() { CPU_FREE(set_); }
  Mask(const Mask&) = delete;
  Mask& operator=(const Mask&) = delete;

  void add(int cpu) {
    if (cpu >= 0 && cpu < kCpus) CPU_SET_S(size_t(cpu), nbytes_, set_);
  }
  bool has(int cpu) const { return CPU_ISSET_S(size_t(cpu), nbytes_, set_); }
  bool empty() const { return CPU_COUNT_S(nbytes_, set_) == 0; }
  cpu_set_t* set() const { return set_; }
  size_t nbytes() const { return nbytes_; }

 private:
  cpu_set_t* set_;
  size_t nbytes_;
};

}  // namespace

int keep_on(pthread_t thread, const std::vector<int>& cpus) {
  Mask mask;
  for (const int cpu : cpus) mask.add(cpu);
  if (mask.empty()) return EINVAL;
  return pthread_setaffinity_np(thread, mask.nbytes(), mask.set());
}

void move_to(const std::vector<int>& cpus) {
  if (std::find(cpus.begin(), cpus.end(), sched_getcpu()) != cpus.end()) return;
  Mask own, wanted;
  if (sched_getaffinity(0, own.nbytes(), own.set()) != 0) return;
  for (const int cpu : cpus)
    if (cpu >= 0 && cpu < Mask::kCpus && own.has(cpu)) wanted.add(cpu);
  if (wanted.empty()) return;
  if (sched_setaffinity(0, wanted.nbytes(), wanted.set()) == 0)
    sched_setaffinity(0, own.nbytes(), own.set());
}

}  // namespace moestro

#include "core/memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace moestro {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

size_t whole_pages(size_t nbytes) { return (nbytes + kHugePage - 1) / kHugePage * kHugePage; }

// From <linux/mempolicy.h>; the calls are made without libnuma, which few machines have.
constexpr int kDefaultPolicy = 0, kPreferred = 1;
constexpr unsigned kFlagNode = 1, kFlagAddress = 2;
constexpr int kMaxNodes = 1024;

}  // namespace

std::byte* allocate_pages(size_t nbytes) {
  // One huge page more than asked, trimmed to alignment, so that huge pages can back all of it.
  const size_t wanted = whole_pages(nbytes);
  void* raw = mmap(nullptr, wanted + kHugePage, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const auto start = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned > start) munmap(raw, aligned - start);
  const uintptr_t end = start + wanted + kHugePage;
  if (end > aligned + wanted)
    munmap(reinterpret_cast<void*>(aligned + wanted), end - aligned - wanted);
  // The rest that does not fill a huge page stays on small ones, so that it costs what it holds.
  madvise(reinterpret_cast<void*>(aligned), nbytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  return reinterpret_cast<std::byte*>(aligned);
}

void free_pages(std::byte* p, size_t nbytes) { munmap(p, whole_pages(nbytes)); }

int prefer_node(std::byte* p, size_t nbytes, int node) {
  constexpr int kBits = 8 * sizeof(unsigned long);
  if (node >= kMaxNodes) return EINVAL;
  unsigned long mask[kMaxNodes / kBits] = {};
  if (node >= 0) mask[node / kBits] = 1ul << (node % kBits);
  // The kernel reads one bit less than it is told.
  const long result = node < 0 ? syscall(SYS_mbind, p, nbytes, kDefaultPolicy, nullptr, 0, 0)
                               : syscall(SYS_mbind, p, nbytes, kPreferred, mask, kMaxNodes + 1, 0);
  return result == 0 ? 0 : errno;
}

int node_of(const std::byte* p) {
  int node = -1;
  const long result = syscall(SYS_get_mempolicy, &node, nullptr, 0, p, kFlagNode | kFlagAddress);
  return result == 0 ? node : -errno;
}

}  // namespace moestro

#include "isa/detect.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include <cstdint>

namespace moestro {

bool cpu_supports_scalar() { return true; }

#if defined(__x86_64__)
namespace {

struct Registers {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  if (__get_cpuid_max(leaf & 0x80000000u, nullptr) < leaf) return {};
  __cpuid_count(leaf, subleaf, r.a, r.b, r.c, r.d);
  return r;
}

bool bit(uint32_t word, int index) { return ((word >> index) & 1u) != 0; }

// The register state the operating system saves (XCR0), zero without OSXSAVE.
uint64_t saved_state() {
  if (!bit(cpuid(1, 0).c, 27)) return 0;
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

bool has_saved(uint64_t mask) { return (saved_state() & mask) == mask; }

constexpr uint64_t kYmmState = 0x6;   // SSE, AVX
constexpr uint64_t kZmmState = 0xe6;  // and opmask, upper ZMM, high ZMM
constexpr int kTileData = 18;         // XCR0 bit
constexpr uint64_t kTileState = uint64_t{3} << 17;

// The kernel makes room for 8 KiB of tile registers per thread only in processes that ask
// (Documentation/arch/x86/xstate.rst), once for all threads, present and to come.
bool permitted_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return permitted;
#else
  return false;
#endif
}

}  // namespace

bool cpu_supports_avx2() {
  const Registers basic = cpuid(1, 0), extended = cpuid(7, 0);
  const bool fma = bit(basic.c, 12), avx = bit(basic.c, 28), f16c = bit(basic.c, 29);
  return has_saved(kYmmState) && fma && avx && f16c && bit(extended.b, 5);
}

bool cpu_supports_avx_vnni() { return cpu_supports_avx2() && bit(cpuid(7, 1).a, 4); }

bool cpu_supports_avx512() {
  const Registers extended = cpuid(7, 0);
  const bool f = bit(extended.b, 16), dq = bit(extended.b, 17);
  const bool bw = bit(extended.b, 30), vl = bit(extended.b, 31);
  return cpu_supports_avx2() && has_saved(kZmmState) && f && dq && bw && vl;
}

bool cpu_supports_avx512_vnni() { return cpu_supports_avx512() && bit(cpuid(7, 0).c, 11); }

bool cpu_supports_avx512_bf16() {
  const bool vbmi = bit(cpuid(7, 0).c, 1), bf16 = bit(cpuid(7, 1).a, 5);
  return cpu_supports_avx512_vnni() && vbmi && bf16;
}

bool cpu_supports_amx() {
  const Registers extended = cpuid(7, 0);
  const bool bf16 = bit(extended.d, 22), tile = bit(extended.d, 24), int8 = bit(extended.d, 25);
  return cpu_supports_avx512_bf16() && bf16 && tile && int8 && has_saved(kTileState) &&
         permitted_tiles();
}
#endif

}  // namespace moestro

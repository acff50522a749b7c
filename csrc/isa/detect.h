// What the CPU and the operating system support; the only reader of CPUID and XGETBV.
#pragma once

namespace moestro {

bool cpu_supports_scalar();
#if defined(__x86_64__)
bool cpu_supports_avx2();
bool cpu_supports_avx_vnni();
bool cpu_supports_avx512();
bool cpu_supports_avx512_vnni();
bool cpu_supports_avx512_bf16();
// Also asks Linux to let this process use the tile registers.
bool cpu_supports_amx();
#endif

}  // namespace moestro

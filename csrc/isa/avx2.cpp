// AVX2 with FMA and F16C: 256-bit lanes in pairs, maddubs dot.
#include "isa/prelude.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace moestro {
namespace {
#include "simd/avx2.h"
//
#include "micro/dot_avx2.h"
//
#include "algo/make_table.h"
}  // namespace
constinit const IsaTable k_avx2 = make_table("avx2", k_vectors_avx2);
}  // namespace moestro
#pragma GCC pop_options

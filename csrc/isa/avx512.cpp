// AVX-512 F/BW/VL/DQ without VNNI: maddubs dot on 512 bits.
#include "isa/prelude.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace moestro {
namespace {
#include "simd/avx512.h"
//
#include "micro/dot_avx512.h"
//
#include "algo/make_table.h"
}  // namespace
constinit const IsaTable k_avx512 = make_table("avx512", k_vectors_avx512);
}  // namespace moestro
#pragma GCC pop_options

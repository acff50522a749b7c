// AVX-512 with VNNI: vpdpbusd.
#include "isa/prelude.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
namespace moestro {
namespace {
#include "simd/avx512.h"
//
#include "micro/dot_vnni.h"
//
#include "algo/make_table.h"
}  // namespace
constinit const IsaTable k_avx512_vnni = make_table("avx512_vnni", k_vectors_avx512);
}  // namespace moestro
#pragma GCC pop_options

// 512-bit vectors.
#include "isa/prelude.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace moestro {
namespace {
#include "simd/avx512.h"
//
#include "micro/dot_avx512.h"
//
#include "algo/latent_kernels.h"
#include "algo/router_kernels.h"
}  // namespace
constinit const VectorTable k_vectors_avx512 = {make_latent_kernels(), route_row_by};
}  // namespace moestro
#pragma GCC pop_options

// Kernels that need nothing but the vector names of simd/: all instruction sets of one vector width
// share them, so they are compiled once per width and not once per kernel table.
#pragma once

#include "isa/latent_kernels.h"
#include "isa/router_kernels.h"

namespace moestro {

struct VectorTable {
  LatentKernels latent;
  RouteKernel route;
};

extern const VectorTable k_vectors_scalar;
#if defined(__x86_64__)
extern const VectorTable k_vectors_avx2;
extern const VectorTable k_vectors_avx512;
#endif

}  // namespace moestro

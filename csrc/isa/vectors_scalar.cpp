// Plain C++, any machine.
#include "isa/prelude.h"

namespace moestro {
namespace {
#include "simd/scalar.h"
//
#include "micro/dot_scalar.h"
//
#include "algo/latent_kernels.h"
#include "algo/router_kernels.h"
}  // namespace
constinit const VectorTable k_vectors_scalar = {make_latent_kernels(), route_row_by};
}  // namespace moestro

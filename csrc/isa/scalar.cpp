// The reference table: plain C++, any machine.
#include "isa/prelude.h"

namespace moestro {
namespace {
#include "simd/scalar.h"
//
#include "micro/dot_scalar.h"
//
#include "algo/make_table.h"
}  // namespace
constinit const IsaTable k_scalar = make_table("scalar", k_vectors_scalar);
}  // namespace moestro

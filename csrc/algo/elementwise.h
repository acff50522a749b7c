// Ops that treat each element of the live rows alone.
#pragma once

#include <memory>

#include "algo/rows.h"
#include "core/program.h"

namespace moestro {

// x [T, width] = e^x, in place.
std::unique_ptr<Op> make_exp(float* x, int64_t width, Rows rows);
// x [T, width] = 1 / (1 + e^-x), in place.
std::unique_ptr<Op> make_sigmoid(float* x, int64_t width, Rows rows);
// out [T, width] = silu(gate) * up; out may be gate or up.
std::unique_ptr<Op> make_silu_mul(const float* gate, const float* up, float* out, int64_t width,
                                  Rows rows);

}  // namespace moestro

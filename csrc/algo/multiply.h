// A product by a kernel table of one's choice, in the calling thread: what the self-check compares.
#pragma once

#include <cstdint>

#include "formats/format.h"
#include "isa/table.h"

namespace moestro {

// out[t][n] = x[t] . weight[n]; x [tokens, weight.cols], out [tokens, weight.rows]. The same
// activation and tile kernels as Linear, but neither the active table nor the team is touched.
void multiply_by(const IsaTable& table, const PackedMatrix& weight, const float* x, int64_t tokens,
                 float* out);

}  // namespace moestro

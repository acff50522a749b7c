// A packed matrix of its own for each head: products of per-head channels.
#pragma once

#include <memory>

#include "algo/rows.h"
#include "core/program.h"
#include "formats/format.h"

namespace moestro {

struct LinearHeadsArgs {
  const float* x;  // [T, heads * x_width]; the first weight.cols channels of each head are read
  PackedMatrix weight;  // [heads * N, cols], N a multiple of 16
  float* out;           // [T, heads * N]
  int64_t heads;
  int64_t x_width;
};

// Input channels that one worker's scratch has room for.
constexpr int64_t kMaxHeadInputs = 4096;

std::unique_ptr<Op> make_linear_heads(const LinearHeadsArgs& args, Rows rows);

}  // namespace moestro

// Rotary position embedding over the live rows of a batch, in place.
#pragma once

#include <memory>

#include "algo/rows.h"
#include "core/program.h"

namespace moestro {

struct RopeArgs {
  float* x;                  // [T, heads * head_dim]
  const int32_t* positions;  // [T]
  const float* cos;          // [max_positions, half]
  const float* sin;
  int64_t heads;
  int64_t head_dim;
  int64_t offset;  // channel of each head where those that turn begin
  int64_t half;    // pairs that turn in each head
  int64_t max_positions;
  bool interleaved;
};

std::unique_ptr<Op> make_rope(const RopeArgs& args, Rows rows);

}  // namespace moestro

// Softmax and top-k choice of experts for each live row.
#pragma once

#include <memory>

#include "algo/rows.h"
#include "core/program.h"

namespace moestro {

struct RouteArgs {
  const float* logits;  // [T, experts]
  int32_t* ids;         // [T, top_k]
  float* weights;       // [T, top_k]
  int64_t experts;
  int64_t top_k;
  bool normalize;
};

std::unique_ptr<Op> make_route(const RouteArgs& args, Rows rows);

}  // namespace moestro

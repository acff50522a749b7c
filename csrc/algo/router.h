// Choice of experts and their weights for each live row.
#pragma once

#include <memory>

#include "algo/rows.h"
#include "core/program.h"
#include "isa/router_kernels.h"

namespace moestro {

struct RouteArgs {
  const float* logits;  // [T, experts]
  int32_t* ids;         // [T, top_k]
  float* weights;       // [T, top_k]
  RouteRule rule;
};

// Experts that one worker's scratch has room for.
constexpr int64_t kMaxExperts = 64 * 1024;

std::unique_ptr<Op> make_route(const RouteArgs& args, Rows rows);

}  // namespace moestro

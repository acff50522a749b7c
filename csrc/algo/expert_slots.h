// The MoE operator in two halves, so that tables of experts in several places can share a layer:
// each writes what its experts give into slots [T, top_k, hidden], and one op sums all slots. Same
// bits as the whole (see moe.cpp), however the experts are divided.
#pragma once

#include <memory>

#include "algo/moe.h"

namespace moestro {

// `args.out` is [T, top_k, hidden]; of its only group the slots of experts that are in memory are
// written. Weights are not used.
std::unique_ptr<Op> make_moe_slots(const MoeArgs& args, Rows rows);

struct CombineArgs {
  const float* y;        // [T, top_k, hidden]
  const int32_t* ids;    // [T, top_k]; below zero: skip
  const float* weights;  // [T, top_k]
  int64_t top_k;
  int64_t hidden;
  float* out;  // [T, hidden]
  bool accumulate;
};

// out[t] = (out[t] +) the sum of weights * y in ascending id.
std::unique_ptr<Op> make_combine_experts(const CombineArgs& args, Rows rows);

struct CopySlotsArgs {
  const float* from;        // [T, top_k, hidden]
  const int32_t* ids;       // [T, top_k]; below zero: skip
  const int64_t* pointers;  // [experts]
  int64_t experts;
  int64_t top_k;
  int64_t hidden;
  float* to;  // [T, top_k, hidden]
};

// Copies the slots of experts that are in memory by `pointers`.
std::unique_ptr<Op> make_copy_slots(const CopySlotsArgs& args, Rows rows);

struct CopyRowsArgs {
  const std::byte* x;  // [T, width]
  std::byte* out;      // [T, width]
  int64_t width;       // bytes
};

std::unique_ptr<Op> make_copy_rows(const CopyRowsArgs& args, Rows rows);

}  // namespace moestro

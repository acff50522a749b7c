// The MoE operator: all experts of one layer in one op (see moe.cpp).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "algo/rows.h"
#include "core/program.h"
#include "isa/matrix_kernels.h"

namespace moestro {

// One of an expert's matrices: geometry, and its byte offset in every expert's blob.
struct ExpertMatrix {
  PackedMatrix matrix;  // data is null
  int64_t offset;
};

// A table of experts and who passes them.
struct ExpertArgs {
  const int32_t* ids;    // [T, top_k]; below zero: skip
  const float* weights;  // [T, top_k]; null: all one
  int64_t top_k;
  const int64_t*
      pointers;  // [experts] address of each blob, 0: not in memory; null: see streamed_moe.h
  int64_t experts;
  ExpertMatrix gate, up, down;
  // [experts, hidden] or null: column j of an expert's gate and up meets x[order[j]].
  const int32_t* input_orders;
  const float* gate_bias;  // [experts, intermediate] or null
  const float* up_bias;    // [experts, intermediate] or null
  const float* down_bias;  // [experts, hidden] or null
  Activation activation;
  bool skip_absent = false;  // leave out experts that are not in memory, instead of refusing them
};

// The routed experts, and those that every token passes, if there are any.
constexpr size_t kMaxGroups = 2;

struct MoeArgs {
  const float* x;  // [T, hidden]
  int64_t hidden;
  std::vector<ExpertArgs> groups;  // summed in this order
  float* out;                      // [T, hidden]
  bool accumulate;
};

// Throws Error(kUnsupportedOp) listing the known names.
Activation activation_named(const std::string& name);

std::unique_ptr<Op> make_moe(const MoeArgs& args, Rows rows);

}  // namespace moestro

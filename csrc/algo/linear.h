// Products with packed matrices outside the experts, and rows gathered from one.
#pragma once

#include <memory>

#include "algo/rows.h"
#include "core/program.h"
#include "formats/format.h"

namespace moestro {

struct LinearArgs {
  const float* x;  // [T, cols]
  PackedMatrix weight;
  const int32_t* input_order;  // [cols] or null: column j of the weight meets x[input_order[j]]
  float* out;                  // [T, rows]
  const float* bias;           // [rows] or null
  bool accumulate;             // add to out
};
std::unique_ptr<Op> make_linear(const LinearArgs& args, Rows rows);

struct EmbedArgs {
  const int32_t* ids;  // [T]
  PackedMatrix weight;
  float* out;  // [T, cols]
};
std::unique_ptr<Op> make_embed(const EmbedArgs& args, Rows rows);

}  // namespace moestro

// Copy of chosen rows.
#pragma once

#include <memory>

#include "algo/rows.h"
#include "core/program.h"

namespace moestro {

struct GatherArgs {
  const float* x;          // [source_rows, width]
  const int32_t* indices;  // [L]
  float* out;              // [L, width]
  int64_t source_rows;
  int64_t width;
};

std::unique_ptr<Op> make_gather(const GatherArgs& args, Rows rows);

}  // namespace moestro

// RMS norm over the live rows of a batch.
#pragma once

#include <memory>

#include "algo/rows.h"
#include "core/program.h"

namespace moestro {

struct RmsNormArgs {
  const float* x;
  const float* weight;
  float* out;
  float* residual;  // may be null
  int64_t width;    // of a row
  int64_t groups;   // equal parts of a row, each normed on its own
  float eps;
};

std::unique_ptr<Op> make_rmsnorm(const RmsNormArgs& args, Rows rows);

}  // namespace moestro

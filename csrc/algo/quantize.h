// Packs float matrices: the search for scales of all tiles, on the thread team.
#pragma once

#include <cstdint>
#include <string>

#include "formats/format.h"
#include "isa/pack_kernels.h"

namespace moestro {

struct QuantizeArgs {
  const void* weight;  // [rows][cols]
  FloatType type;
  PackedMatrix matrix;      // data is not used
  const float* importance;  // weight of each channel's squared error [padded_cols], or null
  uint8_t* out;             // [matrix.nbytes()]
};

struct QuantizeLoss {
  double error;  // squared error of all weights, not weighted
  double norm;   // their squared norm
};

// Whether there is a search for the format.
bool can_quantize(const std::string& format);

// The same bytes and sums on every instruction set and with any number of threads. Throws
// Error(kCheckpoint) for weights that are not finite or beyond the format (out is then undefined),
// Error(kUnsupportedFormat) for a format without a search.
QuantizeLoss quantize(const QuantizeArgs& args);

}  // namespace moestro

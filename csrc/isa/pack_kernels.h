// Leaf kernels that turn floats into packed tiles.
#pragma once

#include <cstdint>

#include "formats/format.h"

namespace moestro {

enum class FloatType : uint8_t { kF32, kF16, kBf16 };

// One tile to fill from floats: 16 output channels x one K-group, lane c being channel c.
struct QuantizeJob {
  const float* x;  // [group][16], padded as the format asks
  const float* w;  // weight of each channel's squared error [group], or null for all ones
  float* codes;    // scratch [group][16]
  int group;       // channels, a multiple of 32
  int valid;       // of them not padding
  uint8_t* tile;   // out
  double error;    // out: squared error of the valid channels, unweighted
  double norm;     // out: their squared norm
  bool lost;       // out: some channel is beyond what the format stores
};

struct PackKernels {
  // x[k][c] = rows[c][k] of n elements as float32. Returns whether all are finite.
  bool (*gather)(const void* const* rows, FloatType type, int n, float* x);
  void (*quantize[kFormatCount])(QuantizeJob& job);
};

}  // namespace moestro

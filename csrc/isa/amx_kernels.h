// What AMX replaces in the table of the instruction set it stands on.
#pragma once

#include "isa/table.h"

namespace moestro {

struct AmxKernels {
  // Where null: as below.
  void (*quantize)(const float* x, int n, const Activations& act, int64_t row, int64_t first);
  void (*gate_quantize[kActivationCount])(const GateBlock& block, const Activations& act,
                                          int64_t row0, int64_t first);
  void (*tiles[kFormatCount])(const TileJob& job);
  int64_t (*dot_peak)(int64_t rounds);
  int64_t (*bf16_peak)(int64_t rounds);
};

#if defined(__x86_64__)
extern const AmxKernels k_amx_kernels;
#endif
extern const AmxKernels k_amx_emulated_kernels;

}  // namespace moestro

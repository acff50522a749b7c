// What AMX replaces in the table of the instruction set it stands on.
#pragma once

#include "isa/table.h"

namespace moestro {

struct AmxKernels {
  void (*tiles[kFormatCount])(const TileJob& job);  // null: as below
  int64_t (*dot_peak)(int64_t rounds);
};

#if defined(__x86_64__)
extern const AmxKernels k_amx_kernels;
#endif
extern const AmxKernels k_amx_emulated_kernels;

}  // namespace moestro

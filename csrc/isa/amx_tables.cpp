// The tables with AMX kernels: those below them, with some entries replaced. Baseline code, since
// it runs on every machine when the module is loaded.
#include "isa/amx_kernels.h"

namespace moestro {
namespace {

IsaTable on_top_of(IsaTable table, const char* name, const AmxKernels& kernels) {
  table.name = name;
  for (int kind = 0; kind < kFormatCount; ++kind)
    if (kernels.tiles[kind] != nullptr) table.matrix.tiles[kind] = kernels.tiles[kind];
  table.matrix.dot_peak = kernels.dot_peak;
  return table;
}

}  // namespace

#if defined(__x86_64__)
const IsaTable k_amx = on_top_of(avx512_bf16_table(), "amx", k_amx_kernels);
#endif
const IsaTable k_amx_emulated = on_top_of(k_scalar, "amx_emulated", k_amx_emulated_kernels);

}  // namespace moestro

// The tables with AMX kernels: those below them, with some entries replaced. Baseline code, since
// it runs on every machine when the module is loaded.
#include "isa/amx_kernels.h"

namespace moestro {
namespace {

IsaTable on_top_of(IsaTable table, const char* name, const AmxKernels& kernels) {
  table.name = name;
  table.matrix.folds = true;
  if (kernels.quantize != nullptr) table.matrix.quantize = kernels.quantize;
  for (int a = 0; a < kActivationCount; ++a)
    if (kernels.gate_quantize[a] != nullptr)
      table.matrix.gate_quantize[a] = kernels.gate_quantize[a];
  for (int kind = 0; kind < kFormatCount; ++kind)
    if (kernels.tiles[kind] != nullptr) table.matrix.tiles[kind] = kernels.tiles[kind];
  table.matrix.dot_peak = kernels.dot_peak;
  table.matrix.bf16_peak = kernels.bf16_peak;
  return table;
}

}  // namespace

#if defined(__x86_64__) && !defined(MOESTRO_SCALAR_ONLY)
const IsaTable k_amx = on_top_of(avx512_bf16_table(), "amx", k_amx_kernels);
#endif
const IsaTable k_amx_emulated = on_top_of(k_scalar, "amx_emulated", k_amx_emulated_kernels);

}  // namespace moestro

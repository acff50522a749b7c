// One instruction set's kernels: leaf functions over rows and tiles. Everything above them (task
// splitting, barriers, op objects) is written once in algo/*.cpp and calls through this table.
#pragma once

#include "isa/attention_kernels.h"
#include "isa/float_kernels.h"
#include "isa/matrix_kernels.h"
#include "isa/pack_kernels.h"
#include "isa/vector_table.h"

namespace moestro {

struct IsaTable {
  const char* name;
  FloatKernels floats;
  MatrixKernels matrix;
  AttentionKernels attention;
  PackKernels pack;
  const VectorTable* vectors;  // shared by all tables of the same vector width
};

#if defined(__x86_64__)
// k_avx512_bf16 for tables that stand on it: initializers of other files may run before its own.
IsaTable avx512_bf16_table();
#endif

#define MOESTRO_ISA(isa) extern const IsaTable k_##isa;
#define MOESTRO_EMULATED_ISA(isa) MOESTRO_ISA(isa)
#include "isa/isa.def"
#undef MOESTRO_EMULATED_ISA
#undef MOESTRO_ISA

}  // namespace moestro

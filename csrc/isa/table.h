// One instruction set's kernels: leaf functions over rows and tiles. Everything above them (task
// splitting, barriers, op objects) is written once in algo/*.cpp and calls through this table.
#pragma once

#include "isa/attention_kernels.h"
#include "isa/float_kernels.h"
#include "isa/matrix_kernels.h"
#include "isa/pack_kernels.h"

namespace moestro {

struct IsaTable {
  const char* name;
  FloatKernels floats;
  MatrixKernels matrix;
  AttentionKernels attention;
  PackKernels pack;
};

#define MOESTRO_ISA(isa) extern const IsaTable k_##isa;
#include "isa/isa.def"
#undef MOESTRO_ISA

}  // namespace moestro

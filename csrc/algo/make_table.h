// Assembles one ISA's kernel table from the algo/ headers. Included last in each isa/*.cpp.
#pragma once

#include "algo/attention_kernels.h"
#include "algo/float_kernels.h"
#include "algo/matrix_kernels.h"
#include "algo/pack_kernels.h"

constexpr IsaTable make_table(const char* name, const VectorTable& vectors) {
  return {name,
          make_float_kernels(),
          make_matrix_kernels(),
          make_attention_kernels(),
          make_pack_kernels(),
          &vectors};
}

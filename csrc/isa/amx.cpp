// AMX tiles (int8, bf16) on top of avx512_bf16; amx_tables.cpp makes the table.
#include "isa/amx_kernels.h"
#include "isa/prelude.h"

#pragma GCC push_options
#pragma GCC target( \
    "amx-tile,amx-int8,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
namespace moestro {
namespace {
#include "simd/avx512.h"
//
#include "micro/amx_tile.h"

inline auto few_tokens(FormatKind kind) {
  return k_avx512_bf16.matrix.tiles[static_cast<int>(kind)];
}

#include "algo/tiles_amx.h"
}  // namespace
constinit const AmxKernels k_amx_kernels = make_amx_kernels<HwTile>();
}  // namespace moestro
#pragma GCC pop_options

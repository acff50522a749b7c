// AMX tiles (int8, bf16) on top of avx512_bf16; amx_tables.cpp makes the table.
#include "isa/amx_kernels.h"
#include "isa/prelude.h"

#pragma GCC push_options
#pragma GCC target(                                                                        \
    "amx-tile,amx-int8,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16," \
    "avx512vbmi,avx2,fma,f16c")
namespace moestro {
namespace {
#include "simd/avx512.h"
//
#include "micro/amx_tile.h"
#include "micro/bf16_pairs.h"
#include "micro/dot_vnni.h"
//
#include "algo/decode.h"
#include "algo/math.h"
//
#include "algo/activation_kernels.h"
#include "algo/tiles_int.h"
//
#include "algo/tiles_pairs.h"

inline auto few_tokens(FormatKind kind) {
  return k_avx512_bf16.matrix.tiles[static_cast<int>(kind)];
}

template <class Layout>
inline void decode_pairs(Layout, const uint8_t* block, uint8_t* panel) {
  for (int k = 0; k < kBlockChannels; k += 4, panel += 128) {
    Pair w[2];
    PairSource<Layout>::load(block, k, w);
    pair_store(panel, w[0]);
    pair_store(panel + 64, w[1]);
  }
}

#include "algo/make_amx_kernels.h"
}  // namespace
constinit const AmxKernels k_amx_kernels = make_amx_kernels<HwTile>();
}  // namespace moestro
#pragma GCC pop_options

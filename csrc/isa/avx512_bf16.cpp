// AVX-512 with VNNI, BF16 and VBMI: the table of avx512_vnni, whose integer kernels have nothing to
// gain here, with bfloat16 products by vdpbf16ps.
#include "isa/prelude.h"

#pragma GCC push_options
#pragma GCC target( \
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi,avx2,fma,f16c")
namespace moestro {
namespace {
#include "simd/avx512.h"
//
#include "micro/bf16_pairs.h"
#include "micro/bf16_rows.h"
#include "micro/dot_vnni.h"
//
#include "algo/decode.h"
#include "algo/math.h"
//
#include "algo/activation_kernels.h"
#include "algo/tiles_int.h"
//
#include "algo/tiles_pairs.h"
//
constexpr const AttentionKernels& kOtherCaches = k_avx512_vnni.attention;
#include "algo/attention_pairs.h"

// What differs from avx512_vnni; the rest is null. (Named here so that it is instantiated for the
// target.)
constexpr MatrixKernels make_pair_kernels() {
  MatrixKernels k{};
  k.quantize = quantize_row<PairRows>;
#define MOESTRO_ACTIVATION(kind, name, gate) \
  k.gate_quantize[int(Activation::kind)] = gate_quantize_rows<gate, PairRows>;
#include "isa/activation.def"
#undef MOESTRO_ACTIVATION
  k.tiles[int(FormatKind::kBf16)] = pair_tiles<Bf16Layout>;
  k.tiles[int(FormatKind::kFp8)] = pair_tiles<Fp8Layout>;
  k.bf16_peak = pair_peak;
  return k;
}
constexpr MatrixKernels kPairKernels = make_pair_kernels();
}  // namespace
}  // namespace moestro
#pragma GCC pop_options

namespace moestro {

// Runs before main on any machine, so it must stay outside the target region.
IsaTable avx512_bf16_table() {
  IsaTable table = k_avx512_vnni;
  table.name = "avx512_bf16";
  table.matrix.quantize = kPairKernels.quantize;
  std::copy(std::begin(kPairKernels.gate_quantize), std::end(kPairKernels.gate_quantize),
            table.matrix.gate_quantize);
  for (int f = 0; f < kFormatCount; ++f)
    if (kPairKernels.tiles[f] != nullptr) table.matrix.tiles[f] = kPairKernels.tiles[f];
  table.matrix.bf16_peak = kPairKernels.bf16_peak;
  table.attention.pack_queries = pack_queries;
  table.attention.attend = attend;
  return table;
}

const IsaTable k_avx512_bf16 = avx512_bf16_table();
}  // namespace moestro

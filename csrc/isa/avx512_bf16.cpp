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
//
#include "micro/bf16_rows.h"
//
constexpr const AttentionKernels& kOtherCaches = k_avx512_vnni.attention;
#include "algo/attention_pairs.h"
}  // namespace
}  // namespace moestro
#pragma GCC pop_options

namespace moestro {

// Runs before main on any machine, so it must stay outside the target region.
IsaTable avx512_bf16_table() {
  IsaTable table = k_avx512_vnni;
  table.name = "avx512_bf16";
  table.matrix.bf16_peak = pair_peak;
  table.attention.pack_queries = pack_queries;
  table.attention.attend = attend;
  return table;
}

const IsaTable k_avx512_bf16 = avx512_bf16_table();
}  // namespace moestro

// AVX2 with AVX-VNNI (processors without AVX-512): the table of avx2 with integer products by the
// VEX-encoded vpdpbusd.
#include "isa/prelude.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avxvnni")
namespace moestro {
namespace {
#include "simd/avx2.h"
//
#include "micro/dot_avx_vnni.h"
//
#include "algo/decode.h"
#include "algo/tiles_int.h"
//
#include "algo/probe_kernels.h"

template <class Layout>
constexpr auto dot_tiles() -> void (*)(const TileJob&) {
  if constexpr (Layout::kFloat) {
    return nullptr;
  } else {
    return int_tiles<Layout>;
  }
}

// What differs from avx2; the rest is null. (Named here so that it is instantiated for the target.)
constexpr MatrixKernels make_dot_kernels() {
  MatrixKernels k{};
#define MOESTRO_FORMAT(kind, layout, stem, grouped) \
  k.tiles[int(FormatKind::kind)] = dot_tiles<layout>();
#include "formats/formats.def"
#undef MOESTRO_FORMAT
  k.read_bytes = read_bytes;
  k.dot_peak = dot_peak;
  k.fma_peak = fma_peak;
  return k;
}
constexpr MatrixKernels kDotKernels = make_dot_kernels();
}  // namespace
}  // namespace moestro
#pragma GCC pop_options

namespace moestro {
namespace {

// Runs before main on any machine, so it must stay outside the target region.
IsaTable with_dot_kernels(IsaTable table) {
  table.name = "avx_vnni";
  for (int f = 0; f < kFormatCount; ++f)
    if (kDotKernels.tiles[f] != nullptr) table.matrix.tiles[f] = kDotKernels.tiles[f];
  table.matrix.read_bytes = kDotKernels.read_bytes;
  table.matrix.dot_peak = kDotKernels.dot_peak;
  table.matrix.fma_peak = kDotKernels.fma_peak;
  return table;
}

}  // namespace

const IsaTable k_avx_vnni = with_dot_kernels(k_avx2);
}  // namespace moestro

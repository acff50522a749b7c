// Assembles the AMX kernels of a translation unit.
#pragma once

#include "algo/amx_grid.h"
#include "algo/decode.h"
#include "algo/tiles_amx_pairs.h"
//
#include "algo/tiles_amx_folded.h"
//
#include "algo/tiles_amx.h"

template <class Tile, FormatKind kKind, class Layout>
constexpr auto amx_tiles_of() {
  void (*tiles)(const TileJob&) = nullptr;
  if constexpr (!Layout::kFloat) tiles = amx_int_tiles<Tile, kKind, Layout>;
  if constexpr (kPairs<Layout>) tiles = amx_pair_tiles<Tile, Layout>;
  return tiles;
}

template <class Tile>
constexpr AmxKernels make_amx_kernels() {
  return {.quantize = nullptr,
          .gate_quantize = {},
          .tiles =
              {
#define MOESTRO_FORMAT(kind, layout, stem, grouped) amx_tiles_of<Tile, FormatKind::kind, layout>(),
#include "formats/formats.def"
#undef MOESTRO_FORMAT
              },
          .dot_peak = amx_peak<Tile, false>,
          .bf16_peak = amx_peak<Tile, true>};
}

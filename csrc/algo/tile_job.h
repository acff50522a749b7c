// What a kernel is asked for: the products of a pair of row tiles.
#pragma once

#include <algorithm>

#include "isa/matrix_kernels.h"

namespace moestro {

// Tiles that a worker reads in order: where they end, and where those it reads next begin.
struct TileRun {
  const uint8_t* end;
  const uint8_t* next;
};

// All tiles of a matrix, over and over.
inline TileRun whole_run(const PackedMatrix& m) { return {m.data + m.nbytes(), m.data}; }

// Products of row tiles `tile` and the next, or of `tile` alone where the next is `end`, with the
// first `tokens` rows of `act`.
inline TileJob tile_job(const PackedMatrix& m, int64_t tile, int64_t end, const TileRun& run,
                        const Activations& act, int64_t tokens, float* out, std::byte* scratch) {
  const auto tiles = static_cast<int>(std::min<int64_t>(2, end - tile));
  return {.tile = {m.row_tile(tile), m.row_tile(tile + tiles - 1)},
          .tiles = tiles,
          .tile_blocks = m.tile_blocks,
          .tile_bytes = m.tile_bytes,
          .blocks = m.blocks(),
          .run_end = run.end,
          .run_jump = run.next - run.end,
          .act = act,
          .rows = nullptr,
          .m = static_cast<int>(tokens),
          .out = out,
          .scratch = scratch};
}

}  // namespace moestro

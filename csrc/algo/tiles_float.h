// Float tile products. Included in each ISA's anonymous namespace.
//
// Two chains of fused multiply-adds per output channel, even and odd input channels, added at the
// end: the same order for any number of tokens, so results do not depend on the batch.
#pragma once

template <class Layout, int kTokens, int kTiles>
void multiply_float(const TileJob& job, int first_tile, int first_token) {
  const float* x[kTokens];
  F32 even[kTokens][kTiles], odd[kTokens][kTiles];
#pragma GCC unroll 16
  for (int i = 0; i < kTokens; ++i) {
    x[i] = job.act.x + activation_row(job, first_token + i) * job.act.blocks * kBlockChannels;
#pragma GCC unroll 2
    for (int t = 0; t < kTiles; ++t) even[i][t] = odd[i][t] = f_zero();
  }
  // Without a header the tile is the block.
  const int tile_blocks = Layout::kHeader == 0 ? 1 : job.tile_blocks;
  const int64_t tile_bytes = Layout::kHeader == 0 ? Layout::kBlock : job.tile_bytes;
  int64_t tile = 0;
  for (int64_t b = 0, inside = 0; b < job.blocks; ++b) {
    const int64_t block = tile + Layout::kHeader + inside * Layout::kBlock;
    for (int k = 0; k < kBlockChannels; k += 2) {
      F32 w[kTiles][2];
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t)
        FloatTile<Layout>(job.tile[first_tile + t] + tile)
            .pair(job.tile[first_tile + t] + block, k, w[t][0], w[t][1]);
#pragma GCC unroll 16
      for (int i = 0; i < kTokens; ++i) {
        const F32 x0 = f_set1(x[i][b * kBlockChannels + k]);
        const F32 x1 = f_set1(x[i][b * kBlockChannels + k + 1]);
#pragma GCC unroll 2
        for (int t = 0; t < kTiles; ++t) {
          even[i][t] = f_fma(w[t][0], x0, even[i][t]);
          odd[i][t] = f_fma(w[t][1], x1, odd[i][t]);
        }
      }
    }
    if (++inside == tile_blocks) {
      inside = 0;
      tile += tile_bytes;
    }
  }
  float* out = job.out + int64_t{first_token} * kTileChannels * job.tiles;
#pragma GCC unroll 16
  for (int i = 0; i < kTokens; ++i)
#pragma GCC unroll 2
    for (int t = 0; t < kTiles; ++t)
      f_store(out + (int64_t{i} * job.tiles + first_tile + t) * kTileChannels,
              f_add(even[i][t], odd[i][t]));
}

template <class Layout>
void float_tiles(const TileJob& job) {
  for_token_blocks<kBlockTokens>(job.m, [&]<int kTokens>(int i) {
    int t = 0;
    for (; t + 2 <= job.tiles; t += 2) multiply_float<Layout, kTokens, 2>(job, t, i);
    for (; t < job.tiles; ++t) multiply_float<Layout, kTokens, 1>(job, t, i);
  });
}

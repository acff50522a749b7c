// Float tile products. Included in each ISA's anonymous namespace.
//
// Two chains of fused multiply-adds per token and output channel, even and odd input channels,
// added at the end: of the row, or, where a format has scales, of each K-group, with then total =
// fma(sum, scale, total), groups ascending. The order is the same for any number of tokens, so
// results do not depend on the batch.
#pragma once

template <int kTokens, int kTiles>
struct FloatSums {
  F32 even[kTokens][kTiles], odd[kTokens][kTiles];

  [[gnu::always_inline]] void clear() {
#pragma GCC unroll 16
    for (int i = 0; i < kTokens; ++i)
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t) even[i][t] = odd[i][t] = f_zero();
  }

  // The products of `blocks` blocks, x[i] being the tokens' activations of the first.
  template <class Layout>
  [[gnu::always_inline]] void add(const uint8_t* const first[kTiles], const float* const x[kTokens],
                                  int64_t blocks) {
    for (int64_t b = 0; b < blocks; ++b) {
#pragma GCC unroll 4
      for (int k = 0; k < kBlockChannels; k += 2) {
        F32 w[kTiles][2];
#pragma GCC unroll 2
        for (int t = 0; t < kTiles; ++t)
          load_pair(Layout{}, first[t] + b * Layout::kBlock, k, w[t][0], w[t][1]);
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
    }
  }
};

template <class Layout, int kTokens, int kTiles>
void multiply_float(const TileJob& job, int first_tile, int first_token) {
  const float* x[kTokens];
  for (int i = 0; i < kTokens; ++i)
    x[i] = job.act.x + activation_row(job, first_token + i) * job.act.blocks * kBlockChannels;
  const auto out = [&](int i, int t) {
    return job.out + ((int64_t{first_token} + i) * job.tiles + first_tile + t) * kTileChannels;
  };
  if constexpr (Layout::kHeader == 0) {
    FloatSums<kTokens, kTiles> sums;
    sums.clear();
    sums.template add<Layout>(job.tile + first_tile, x, job.blocks);
#pragma GCC unroll 16
    for (int i = 0; i < kTokens; ++i)
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t) f_store(out(i, t), f_add(sums.even[i][t], sums.odd[i][t]));
  } else {
    for (int64_t b = 0, tile = 0; b < job.blocks; b += job.tile_blocks, tile += job.tile_bytes) {
      const uint8_t* weights[kTiles];
      for (int t = 0; t < kTiles; ++t)
        weights[t] = job.tile[first_tile + t] + tile + Layout::kHeader;
      FloatSums<kTokens, kTiles> sums;
      sums.clear();
      sums.template add<Layout>(weights, x, job.tile_blocks);
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t) {
        const F32 scale = load_scale(Layout{}, weights[t] - Layout::kHeader);
#pragma GCC unroll 16
        for (int i = 0; i < kTokens; ++i) {
          const F32 before = b == 0 ? f_zero() : f_load(out(i, t));
          f_store(out(i, t), f_fma(f_add(sums.even[i][t], sums.odd[i][t]), scale, before));
        }
      }
      for (int i = 0; i < kTokens; ++i) x[i] += int64_t{job.tile_blocks} * kBlockChannels;
    }
  }
}

// One or two tokens wait for the memory: they take a tile at a time, whose bytes are one stream.
constexpr int kOneTileTokens = 2;

template <class Layout>
void float_tiles(const TileJob& job) {
  for_token_blocks<kBlockTokens>(job.m, [&]<int kTokens>(int i) {
    if constexpr (kTokens > kOneTileTokens) {
      if (job.tiles == 2) return multiply_float<Layout, kTokens, 2>(job, 0, i);
    }
    for (int t = 0; t < job.tiles; ++t) multiply_float<Layout, kTokens, 1>(job, t, i);
  });
}

// Integer tile products. Included in each ISA's anonymous namespace.
//
// Per 16 output channels, token and block of 32 input channels: an exact integer dot, then the
// float steps acc = fma(float(dot), weight_scale * activation_scale, acc), one per scale in
// ascending order, then acc = fma(minimum, activation_sum, acc) for each where a format has minima.
// Every path below performs these same steps in this same order, so all give the same bits.
//
// With few tokens nothing is prefetched by hand: a worker's bytes are ascending streams which the
// hardware runs ahead of, and asking for every line then costs up to a quarter of the bandwidth.
// With more, products take as long as the bytes, the tokens' activations no longer stay in L1
// beside the weights, and the hardware, following them too, loses the stream of weights (half the
// bandwidth and nothing hidden): there the first pass over a tile asks for what lies kPrefetchBytes
// ahead, into L2, for L1 would have to give up activations for it.
#pragma once

// Tokens from which a format's products take about 0.7 of the time its bytes take.
template <class Layout>
constexpr int kPrefetchTokens = Layout::kBlock >= 512                 ? 5
                                : Layout::kSteps == 2 || Layout::kMin ? 2
                                                                      : 3;
constexpr int64_t kPrefetchBytes = 16384;

// Asks for the bytes that come kPrefetchBytes after [p, p + n).
[[gnu::always_inline]] inline void prefetch_ahead(const TileJob& job, const uint8_t* p, int n) {
  const uint8_t* ahead = p + kPrefetchBytes;
  if (ahead >= job.run_end) ahead += job.run_jump;
  for (int i = 0; i < n; i += 64) prefetch_l2(ahead + i);
}

inline int64_t activation_row(const TileJob& job, int64_t i) {
  return job.rows != nullptr ? job.rows[i] : i;
}

// What the dot of step s begins with.
template <class Layout>
inline int32_t first_sum(const ActivationBlock& x, int s) {
  static_assert(!Layout::kMin || Layout::kZero == 0);
  if constexpr (Layout::kMin) return 0;
  return x.init[s];
}

// One block of kTokens tokens: codes[8] in registers -> acc. Their chains of dots advance side by
// side, so that the window of instructions under way need not span whole chains to fill the pipes.
template <class Layout, int kTokens>
[[gnu::always_inline]] inline void add_block(const U8 codes[8], const F32 step[Layout::kSteps],
                                             const F32 minimum[Layout::kSteps],
                                             const ActivationBlock* const x[kTokens], int64_t b,
                                             F32 acc[kTokens]) {
  constexpr int kQuads = 8 / Layout::kSteps;
#pragma GCC unroll 2
  for (int s = 0; s < Layout::kSteps; ++s) {
    Acc<Layout::kBits> dots[kTokens];
#pragma GCC unroll 8
    for (int i = 0; i < kTokens; ++i)
      dots[i] = Acc<Layout::kBits>::start(first_sum<Layout>(x[i][b], s));
#pragma GCC unroll 8
    for (int j = s * kQuads; j < (s + 1) * kQuads; ++j)
#pragma GCC unroll 8
      for (int i = 0; i < kTokens; ++i) dots[i].dot(codes[j], quad_load(x[i][b].q + 4 * j));
#pragma GCC unroll 8
    for (int i = 0; i < kTokens; ++i)
      acc[i] = f_fma(f_from_i(dots[i].result(first_sum<Layout>(x[i][b], s))),
                     f_mul(step[s], f_set1(x[i][b].scale)), acc[i]);
  }
  if constexpr (Layout::kMin) {
#pragma GCC unroll 2
    for (int s = 0; s < Layout::kSteps; ++s)
#pragma GCC unroll 8
      for (int i = 0; i < kTokens; ++i) acc[i] = f_fma(minimum[s], f_set1(x[i][b].sum[s]), acc[i]);
  }
}

template <class Layout, int kTokens>
[[gnu::always_inline]] inline void add_blocks(const U8 codes[8], const F32 step[Layout::kSteps],
                                              const F32 minimum[Layout::kSteps],
                                              const ActivationBlock* const x[kTokens], int64_t b,
                                              F32 acc[kTokens]) {
  constexpr int kGroups = (kTokens + kTokenChains - 1) / kTokenChains;
  constexpr int kNow = (kTokens + kGroups - 1) / kGroups;
  add_block<Layout, kNow>(codes, step, minimum, x, b, acc);
  if constexpr (kTokens > kNow)
    add_blocks<Layout, kTokens - kNow>(codes, step, minimum, x + kNow, b, acc + kNow);
}

// Few tokens: decode in registers, use at once, stream on. Inlined by force: where GCC 12 left it
// out of line it took acc for unchanged and dropped the call.
template <class Layout, int kTokens, bool kOneBlock>
[[gnu::always_inline]] inline void direct_row_tile(const TileJob& job, const uint8_t* tile,
                                                   const ActivationBlock* const x[kTokens],
                                                   bool first_pass, F32 acc[kTokens]) {
  const int tile_blocks = kOneBlock ? 1 : job.tile_blocks;
  for (int64_t first = 0; first < job.blocks; first += tile_blocks, tile += job.tile_bytes) {
    if (kTokens >= kPrefetchTokens<Layout> && first_pass)
      prefetch_ahead(job, tile, Layout::kHeader);
    const Decoder<Layout> decoder(tile);
    for (int b = 0; b < tile_blocks; ++b) {
      const uint8_t* block = tile + Layout::kHeader + int64_t{b} * Layout::kBlock;
      if (kTokens >= kPrefetchTokens<Layout> && first_pass)
        prefetch_ahead(job, block, Layout::kBlock);
      U8 codes[8];
      Decoder<Layout>::codes(block, codes);
      F32 step[Layout::kSteps], minimum[Layout::kSteps];
      decoder.scales(tile, b, step, minimum);
      add_blocks<Layout, kTokens>(codes, step, minimum, x, first + b, acc);
    }
  }
}

template <class Layout, int kTokens, bool kOneBlock>
void direct_tiles(const TileJob& job, int first_token) {
  const ActivationBlock* x[kTokens];
  for (int i = 0; i < kTokens; ++i)
    x[i] = job.act.packed + activation_row(job, first_token + i) * job.act.blocks;
  for (int t = 0; t < job.tiles; ++t) {
    F32 acc[kTokens];
#pragma GCC unroll 16
    for (int i = 0; i < kTokens; ++i) acc[i] = f_zero();
    direct_row_tile<Layout, kTokens, kOneBlock>(job, job.tile[t], x, first_token == 0, acc);
#pragma GCC unroll 16
    for (int i = 0; i < kTokens; ++i)
      f_store(job.out + (first_token + i) * kTileChannels * job.tiles + kTileChannels * t, acc[i]);
  }
}

// Many tokens where registers are few: a K-block of a tile is decoded once into L1 and reused by
// all.
constexpr int kDecodedBlocks = 16;

template <class Layout>
struct Decoded {
  uint8_t codes[kDecodedBlocks][8][64];
  float step[kDecodedBlocks][Layout::kSteps][16];
  float minimum[kDecodedBlocks][Layout::kSteps][16];
};

// Codes: a layout of the same steps, whose products are used instead of the layout's own.
template <class Layout, class Codes>
void decode_blocks(const TileJob& job, int t, int64_t first, int count, Decoded<Codes>& out) {
  int b = static_cast<int>(first % job.tile_blocks);
  const uint8_t* tile = job.tile[t] + first / job.tile_blocks * job.tile_bytes;
  for (int done = 0; done < count;) {
    prefetch_ahead(job, tile, Layout::kHeader);
    const Decoder<Layout> decoder(tile);
    for (; b < job.tile_blocks && done < count; ++b, ++done) {
      U8 codes[8];
      const uint8_t* block = tile + Layout::kHeader + int64_t{b} * Layout::kBlock;
      prefetch_ahead(job, block, Layout::kBlock);
      Decoder<Layout>::codes(block, codes);
      for (int j = 0; j < 8; ++j) u8_store(out.codes[done][j], codes[j]);
      F32 step[Layout::kSteps], minimum[Layout::kSteps];
      decoder.scales(tile, b, step, minimum);
      for (int s = 0; s < Layout::kSteps; ++s) {
        f_store(out.step[done][s], step[s]);
        if constexpr (Layout::kMin) f_store(out.minimum[done][s], minimum[s]);
      }
    }
    b = 0;
    tile += job.tile_bytes;
  }
}

// kTokens tokens against `count` decoded blocks; continues the sums in out.
template <class Layout, int kTokens>
void multiply_decoded(const TileJob& job, int t, const Decoded<Layout>& decoded, int64_t first,
                      int count, int first_token) {
  constexpr int kQuads = 8 / Layout::kSteps;
  const int64_t out_ld = int64_t{kTileChannels} * job.tiles;
  float* out = job.out + first_token * out_ld + kTileChannels * t;
  const ActivationBlock* x[kTokens];
  F32 acc[kTokens];
  for (int i = 0; i < kTokens; ++i) {
    x[i] = job.act.packed + activation_row(job, first_token + i) * job.act.blocks + first;
    acc[i] = first == 0 ? f_zero() : f_load(out + i * out_ld);
  }
  for (int b = 0; b < count; ++b) {
    for (int s = 0; s < Layout::kSteps; ++s) {
      Acc<Layout::kBits> dots[kTokens];
      for (int i = 0; i < kTokens; ++i)
        dots[i] = Acc<Layout::kBits>::start(first_sum<Layout>(x[i][b], s));
      for (int j = s * kQuads; j < (s + 1) * kQuads; ++j) {
        const U8 codes = u8_load(decoded.codes[b][j]);
        for (int i = 0; i < kTokens; ++i) dots[i].dot(codes, quad_load(x[i][b].q + 4 * j));
      }
      const F32 step = f_load(decoded.step[b][s]);
      for (int i = 0; i < kTokens; ++i)
        acc[i] = f_fma(f_from_i(dots[i].result(first_sum<Layout>(x[i][b], s))),
                       f_mul(step, f_set1(x[i][b].scale)), acc[i]);
    }
    if constexpr (Layout::kMin)
      for (int s = 0; s < Layout::kSteps; ++s)
        for (int i = 0; i < kTokens; ++i)
          acc[i] = f_fma(f_load(decoded.minimum[b][s]), f_set1(x[i][b].sum[s]), acc[i]);
  }
  for (int i = 0; i < kTokens; ++i) f_store(out + i * out_ld, acc[i]);
}

// Calls f.template operator()<n>(first) for the n in 1..kMax that equals count.
template <int kMax, class F>
inline void for_token_block(int first, int count, F& f) {
  if constexpr (kMax > 1) {
    if (count < kMax) return for_token_block<kMax - 1>(first, count, f);
  }
  f.template operator()<kMax>(first);
}

// Covers m tokens with register blocks of at most kMax, as equal as they come: a block reads all
// weights again, so five tokens are one block and not four and one.
template <int kMax, class F>
inline void for_token_blocks(int m, F&& f) {
  const int blocks = (m + kMax - 1) / kMax;
  for (int i = 0; i < blocks; ++i) {
    const int first = m * i / blocks;
    for_token_block<kMax>(first, m * (i + 1) / blocks - first, f);
  }
}

template <class Layout, class Codes = Layout>
void decoded_tiles(const TileJob& job) {
  auto& decoded = *reinterpret_cast<Decoded<Codes>*>(job.scratch);
  static_assert(sizeof(Decoded<Codes>) <= kTileScratchBytes);
  for (int t = 0; t < job.tiles; ++t) {
    for (int64_t first = 0; first < job.blocks; first += kDecodedBlocks) {
      const int count = static_cast<int>(std::min<int64_t>(kDecodedBlocks, job.blocks - first));
      decode_blocks<Layout>(job, t, first, count, decoded);
      for_token_blocks<kBlockTokens>(job.m, [&]<int kTokens>(int i) {
        multiply_decoded<Codes, kTokens>(job, t, decoded, first, count, i);
      });
    }
  }
}

template <class Layout>
void int_tiles(const TileJob& job) {
  if constexpr (kDecodeFrom > 0) {
    if (job.m >= kDecodeFrom) {
      decoded_tiles<Layout>(job);
      return;
    }
  }
  for_token_blocks<kDirectTokens>(job.m, [&]<int kTokens>(int i) {
    if (Layout::kTileBlocks < 2 && job.tile_blocks == 1) {
      direct_tiles<Layout, kTokens, true>(job, i);
    } else {
      direct_tiles<Layout, kTokens, false>(job, i);
    }
  });
}

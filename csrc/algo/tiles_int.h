// Integer tile products. Included in each ISA's anonymous namespace.
//
// Per 16 output channels, token and block of 32 input channels: an exact integer dot, then the float
// steps acc = fma(float(dot), weight_scale * activation_scale, acc), one per scale in ascending order,
// then acc = fma(minimum, activation_sum, acc) for formats with a minimum. Every path below performs
// these same steps in this same order, so all give the same bits.
#pragma once

// How far ahead of the bytes in use a streaming worker prefetches.
constexpr int64_t kPrefetchBytes = 4096;

// Walks a read pointer kPrefetchBytes ahead, continuing at `next` past the end of this job's bytes.
struct Prefetcher {
  const uint8_t* end;
  int64_t jump;
  // Without a next address it falls back to lines already read: a wasted fetch costs bandwidth.
  Prefetcher(const uint8_t* stop, const uint8_t* next)
      : end(stop), jump(next != nullptr ? next - stop : -2 * kPrefetchBytes) {}
  template <int kBytes>
  void touch(const uint8_t* now) const {
    const uint8_t* p = now + kPrefetchBytes;
    if (p >= end) p += jump;
    for (int i = 0; i < kBytes; i += 64) prefetch(p + i);
  }
};

template <class Layout>
inline F32 float_steps(const I32 dots[Layout::kSteps], const F32 step[Layout::kSteps], F32 minimum,
                       const Activations& act, int64_t block_index, F32 acc) {
  const F32 scale = f_set1(act.scale[block_index]);
  for (int s = 0; s < Layout::kSteps; ++s)
    acc = f_fma(f_from_i(dots[s]), f_mul(step[s], scale), acc);
  if constexpr (Layout::kMin) acc = f_fma(minimum, f_set1(act.sum[block_index]), acc);
  return acc;
}

// The dots of one block: codes[8] in registers against one token's 32 bytes.
template <class Layout>
inline void block_dots(const U8 codes[8], const int8_t* x, const int32_t* init,
                       I32 dots[Layout::kSteps]) {
  constexpr int kQuads = 8 / Layout::kSteps;
  for (int s = 0; s < Layout::kSteps; ++s) {
    auto acc = Acc<Layout::kBits>::start(init[s]);
    for (int j = 0; j < kQuads; ++j)
      acc.dot(codes[s * kQuads + j], quad_load(x + 4 * (s * kQuads + j)));
    dots[s] = acc.result(init[s]);
  }
}

// Few tokens: decode in registers, use at once, stream on.
template <class Layout, int kTokens, bool kOneBlock>
inline void direct_row_tile(const TileJob& job, const uint8_t* tile, const int64_t row[kTokens],
                            const Prefetcher& ahead, F32 acc[kTokens]) {
  const int tile_blocks = kOneBlock ? 1 : job.tile_blocks;
  const int64_t blocks_per_row = job.act.ld / kBlockChannels;
  for (int i = 0; i < kTokens; ++i) acc[i] = f_zero();
  for (int64_t first = 0; first < job.blocks; first += tile_blocks, tile += job.tile_bytes) {
    const Decoder<Layout> decoder(tile);
    if constexpr (kOneBlock) ahead.touch<Layout::kHeader + Layout::kBlock>(tile);
    for (int b = 0; b < tile_blocks; ++b) {
      const uint8_t* block = tile + Layout::kHeader + int64_t{b} * Layout::kBlock;
      if constexpr (!kOneBlock)
        ahead.touch<Layout::kBlock + (Layout::kTileBlocks ? Layout::kHeader / 8 : 0)>(block);
      U8 codes[8];
      Decoder<Layout>::codes(block, codes);
      F32 step[Layout::kSteps], minimum = f_zero();
      decoder.scales(tile, b, step, minimum);
      for (int i = 0; i < kTokens; ++i) {
        const int64_t at = row[i] * blocks_per_row + first + b;
        I32 dots[Layout::kSteps];
        block_dots<Layout>(codes, job.act.q + at * kBlockChannels,
                           job.act.init + at * Layout::kSteps, dots);
        acc[i] = float_steps<Layout>(dots, step, minimum, job.act, at, acc[i]);
      }
    }
  }
}

template <class Layout, int kTokens, bool kOneBlock>
void direct_tiles(const TileJob& job, int first_token) {
  int64_t row[kTokens];
  for (int i = 0; i < kTokens; ++i)
    row[i] = job.rows != nullptr ? job.rows[first_token + i] : first_token + i;
  const int64_t stride = job.blocks / job.tile_blocks * job.tile_bytes;
  for (int t = 0; t < job.tiles; ++t) {
    const bool last = t + 1 == job.tiles;
    const Prefetcher ahead(job.tile[t] + stride, last ? job.next : job.tile[t + 1]);
    F32 acc[kTokens];
    direct_row_tile<Layout, kTokens, kOneBlock>(job, job.tile[t], row, ahead, acc);
    for (int i = 0; i < kTokens; ++i)
      f_store(job.out + (first_token + i) * kTileChannels * job.tiles + kTileChannels * t, acc[i]);
  }
}

// Many tokens: a K-block of the tiles is decoded once into L1 and reused by all of them.
constexpr int kDecodedBlocks = 16;

template <class Layout>
struct Decoded {
  uint8_t codes[kBlockTiles][kDecodedBlocks][8][64];
  float step[kBlockTiles][kDecodedBlocks][Layout::kSteps][16];
  float minimum[kBlockTiles][kDecodedBlocks][16];
};

template <class Layout>
void decode_blocks(const TileJob& job, int t, int64_t first, int count, int slot,
                   Decoded<Layout>& out) {
  int b = static_cast<int>(first % job.tile_blocks);
  const uint8_t* tile = job.tile[t] + first / job.tile_blocks * job.tile_bytes;
  for (int done = 0; done < count;) {
    const Decoder<Layout> decoder(tile);
    for (; b < job.tile_blocks && done < count; ++b, ++done) {
      U8 codes[8];
      Decoder<Layout>::codes(tile + Layout::kHeader + int64_t{b} * Layout::kBlock, codes);
      for (int j = 0; j < 8; ++j) u8_store(out.codes[slot][done][j], codes[j]);
      F32 step[Layout::kSteps], minimum = f_zero();
      decoder.scales(tile, b, step, minimum);
      for (int s = 0; s < Layout::kSteps; ++s) f_store(out.step[slot][done][s], step[s]);
      if constexpr (Layout::kMin) f_store(out.minimum[slot][done], minimum);
    }
    b = 0;
    tile += job.tile_bytes;
  }
}

// kTokens tokens x kTiles tiles in registers over `count` decoded blocks; continues the sums in out.
template <class Layout, int kTokens, int kTiles>
void multiply_decoded(const TileJob& job, const Decoded<Layout>& decoded, int slot, int64_t first,
                      int count, int first_token) {
  constexpr int kQuads = 8 / Layout::kSteps;
  const int64_t blocks_per_row = job.act.ld / kBlockChannels;
  float* out = job.out + int64_t{first_token} * kTileChannels * job.tiles + kTileChannels * slot;
  const int64_t out_ld = int64_t{kTileChannels} * job.tiles;
  int64_t at[kTokens];
  F32 acc[kTokens][kTiles];
  for (int i = 0; i < kTokens; ++i) {
    const int64_t token = first_token + i;
    at[i] = (job.rows != nullptr ? job.rows[token] : token) * blocks_per_row + first;
    for (int t = 0; t < kTiles; ++t)
      acc[i][t] = first == 0 ? f_zero() : f_load(out + i * out_ld + kTileChannels * t);
  }
  for (int b = 0; b < count; ++b) {
    for (int s = 0; s < Layout::kSteps; ++s) {
      Acc<Layout::kBits> dots[kTokens][kTiles];
      for (int i = 0; i < kTokens; ++i)
        for (int t = 0; t < kTiles; ++t)
          dots[i][t] = Acc<Layout::kBits>::start(job.act.init[(at[i] + b) * Layout::kSteps + s]);
      for (int j = s * kQuads; j < (s + 1) * kQuads; ++j) {
        U8 codes[kTiles];
        for (int t = 0; t < kTiles; ++t) codes[t] = u8_load(decoded.codes[slot + t][b][j]);
        for (int i = 0; i < kTokens; ++i) {
          const Quad x = quad_load(job.act.q + (at[i] + b) * kBlockChannels + 4 * j);
          for (int t = 0; t < kTiles; ++t) dots[i][t].dot(codes[t], x);
        }
      }
      for (int i = 0; i < kTokens; ++i) {
        const F32 scale = f_set1(job.act.scale[at[i] + b]);
        const int32_t init = job.act.init[(at[i] + b) * Layout::kSteps + s];
        for (int t = 0; t < kTiles; ++t)
          acc[i][t] = f_fma(f_from_i(dots[i][t].result(init)),
                            f_mul(f_load(decoded.step[slot + t][b][s]), scale), acc[i][t]);
      }
    }
    if constexpr (Layout::kMin)
      for (int i = 0; i < kTokens; ++i)
        for (int t = 0; t < kTiles; ++t)
          acc[i][t] = f_fma(f_load(decoded.minimum[slot + t][b]), f_set1(job.act.sum[at[i] + b]),
                            acc[i][t]);
  }
  for (int i = 0; i < kTokens; ++i)
    for (int t = 0; t < kTiles; ++t) f_store(out + i * out_ld + kTileChannels * t, acc[i][t]);
}

// Calls f.template operator()<n>(first) for register blocks of n <= kMax that cover m tokens.
template <int kMax, class F>
inline void for_token_blocks(int m, F&& f) {
  int i = 0;
  for (; i + kMax <= m; i += kMax) f.template operator()<kMax>(i);
  if constexpr (kMax > 4)
    if (m - i >= 4) f.template operator()<4>(i), i += 4;
  if constexpr (kMax > 2)
    if (m - i >= 2) f.template operator()<2>(i), i += 2;
  for (; i < m; ++i) f.template operator()<1>(i);
}

template <class Layout, int kTiles>
void decoded_tiles(const TileJob& job, int slot_tile) {
  auto& decoded = *reinterpret_cast<Decoded<Layout>*>(job.scratch);
  static_assert(sizeof(Decoded<Layout>) <= kTileScratchBytes);
  TileJob part = job;
  for (int t = 0; t < kTiles; ++t) part.tile[t] = job.tile[slot_tile + t];
  part.out = job.out + kTileChannels * slot_tile;
  for (int64_t first = 0; first < job.blocks; first += kDecodedBlocks) {
    const int count = static_cast<int>(std::min<int64_t>(kDecodedBlocks, job.blocks - first));
    for (int t = 0; t < kTiles; ++t) decode_blocks<Layout>(part, t, first, count, t, decoded);
    for_token_blocks<kBlockTokens>(job.m, [&]<int kTokens>(int i) {
      multiply_decoded<Layout, kTokens, kTiles>(part, decoded, 0, first, count, i);
    });
  }
}

// Up to this many tokens the registers-only path reads the weights once or twice and wins.
constexpr int kDirectTokens = 4;

template <class Layout>
void int_tiles(const TileJob& job) {
  if (job.m <= kDirectTokens) {
    for_token_blocks<4>(job.m, [&]<int kTokens>(int i) {
      if (Layout::kTileBlocks == 0 && job.tile_blocks == 1) {
        direct_tiles<Layout, kTokens, true>(job, i);
      } else {
        direct_tiles<Layout, kTokens, false>(job, i);
      }
    });
    return;
  }
  int t = 0;
  if constexpr (kBlockTiles == 2)
    for (; t + 2 <= job.tiles; t += 2) decoded_tiles<Layout, 2>(job, t);
  for (; t < job.tiles; ++t) decoded_tiles<Layout, 1>(job, t);
}

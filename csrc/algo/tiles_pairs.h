// Float tile products by dots of bfloat16 pairs, for instruction sets that have one. Included in
// the anonymous namespace of those, after micro/ and tiles_int.h.
//
// Formats without scales: one chain of pair dots per token and output channel over the whole row.
// Others: per run (a K-group, or the next 128 channels of a longer one) two chains from zero, of
// channels k % 4 = 0, 1 and 2, 3; then total = fma(first + second, scale, total), runs ascending.
// The order is the same for any number of tokens, so results do not depend on the batch.
//
// A chain waits for its last dot, so one token needs two: those of two tiles where the weights are
// only loaded, but of one tile where decoding leaves little time for the memory. There the bytes
// must come as one stream, which the hardware prefetches best.
#pragma once

// Activation rows of bfloat16 take half of a row's floats. They begin at one of sixteen cache lines
// of it, drawn from the row's address: rows lie a power of two apart in most models, and a few
// cache sets would have to hold all tokens of a register block.
inline uint16_t* pair_row(const Activations& act, int64_t row) {
  auto* start = reinterpret_cast<std::byte*>(act.x + row * act.blocks * kBlockChannels);
  if (act.blocks >= 16) {
    const auto line = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(start) >> 6);
    start += (line * 0x9e3779b1u >> 28) * 64;
  }
  return reinterpret_cast<uint16_t*>(start);
}

struct PairRows {
  static void store(const Activations& act, int64_t row, int64_t first, F32 a, F32 b) {
    const LayoutFacts& facts = layout_facts(act.kind);
    if (facts.is_float && !facts.pairs) return FloatRows::store(act, row, first, a, b);
    store_bf16(pair_row(act, row) + first, a, b);
  }
};

// load(): four input channels of a block, two pairs. kTokens: tokens per register block. From
// kPrefetchFrom tokens on a stream is too slow to keep the hardware prefetcher going.
template <class Layout>
struct PairSource;
template <>
struct PairSource<Bf16Layout> {
  static constexpr int kTokens = 12, kPrefetchFrom = 8;
  static void load(const uint8_t* block, int k, Pair w[2]) {
    w[0] = pair_load(block + 32 * k);
    w[1] = pair_load(block + 32 * k + 64);
  }
  [[gnu::always_inline]] static void ask_ahead(const uint8_t* block, int k) {
    prefetch_l2(block + 4096 + 32 * k);
    prefetch_l2(block + 4096 + 32 * k + 64);
  }
};
template <>
struct PairSource<Fp8Layout> {
  static constexpr int kTokens = 12, kPrefetchFrom = 2;
  static void load(const uint8_t* block, int k, Pair w[2]) {
    e4m3_pairs(block + 16 * k, w[0], w[1]);
  }
  [[gnu::always_inline]] static void ask_ahead(const uint8_t* block, int k) {
    prefetch(block + 2048 + 16 * k);
  }
};

// Sums of kTokens tokens x kTiles tiles, in kChains chains by pair.
template <int kTokens, int kTiles, int kChains>
struct PairSums {
  F32 v[kTokens][kTiles][kChains];

  [[gnu::always_inline]] void clear() {
#pragma GCC unroll 16
    for (int i = 0; i < kTokens; ++i)
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t)
#pragma GCC unroll 2
        for (int c = 0; c < kChains; ++c) v[i][t][c] = f_zero();
  }

  // The products of `blocks` blocks, x[i] being the tokens' activations of the first.
  template <class Layout>
  [[gnu::always_inline]] void add(const uint8_t* const first[kTiles],
                                  const uint16_t* const x[kTokens], int64_t blocks) {
    using Source = PairSource<Layout>;
    for (int64_t b = 0; b < blocks; ++b) {
#pragma GCC unroll 8
      for (int k = 0; k < kBlockChannels; k += 4) {
        Pair w[kTiles][2];
#pragma GCC unroll 2
        for (int t = 0; t < kTiles; ++t) {
          const uint8_t* block = first[t] + b * Layout::kBlock;
          Source::load(block, k, w[t]);
          if constexpr (kTokens >= Source::kPrefetchFrom) Source::ask_ahead(block, k);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kTokens; ++i)
#pragma GCC unroll 2
          for (int p = 0; p < 2; ++p) {
            const Pair y = pair_set1(x[i] + b * kBlockChannels + k + 2 * p);
#pragma GCC unroll 2
            for (int t = 0; t < kTiles; ++t)
              v[i][t][p % kChains] = pair_dot(v[i][t][p % kChains], w[t][p], y);
          }
      }
    }
  }
};

template <int kTokens>
inline void find_rows(const TileJob& job, int first_token, const uint16_t* x[kTokens]) {
  for (int i = 0; i < kTokens; ++i) x[i] = pair_row(job.act, activation_row(job, first_token + i));
}

inline float* sum_of(const TileJob& job, int tile, int token) {
  return job.out + (int64_t{token} * job.tiles + tile) * kTileChannels;
}

template <class Layout, int kTokens, int kTiles>
void multiply_unscaled(const TileJob& job, int first_token) {
  const uint16_t* x[kTokens];
  find_rows<kTokens>(job, first_token, x);
  PairSums<kTokens, kTiles, 1> sums;
  sums.clear();
  sums.template add<Layout>(job.tile, x, job.blocks);
#pragma GCC unroll 16
  for (int i = 0; i < kTokens; ++i)
#pragma GCC unroll 2
    for (int t = 0; t < kTiles; ++t) f_store(sum_of(job, t, first_token + i), sums.v[i][t][0]);
}

constexpr int kRunBlocks = 4;  // 128 channels

// The runs of a row tile with scales, in order.
template <class Layout>
struct Runs {
  const uint8_t* tile;
  int64_t tile_bytes;
  int tile_blocks;
  int first = 0;  // block of the tile

  Runs(const TileJob& job, int t)
      : tile(job.tile[t]), tile_bytes(job.tile_bytes), tile_blocks(job.tile_blocks) {}
  int blocks() const { return std::min(kRunBlocks, tile_blocks - first); }
  const uint8_t* weights() const {
    return tile + Layout::kHeader + int64_t{first} * Layout::kBlock;
  }
  F32 scale() const { return f_load(reinterpret_cast<const float*>(tile)); }
  void next() {
    first += kRunBlocks;
    if (first < tile_blocks) return;
    first = 0;
    tile += tile_bytes;
  }
};

template <class Layout, int kTokens>
void multiply_scaled(const TileJob& job, int tile, int first_token) {
  const uint16_t* x[kTokens];
  find_rows<kTokens>(job, first_token, x);
  F32 total[kTokens];
#pragma GCC unroll 16
  for (int i = 0; i < kTokens; ++i) total[i] = f_zero();
  Runs<Layout> run(job, tile);
  for (int64_t done = 0; done < job.blocks; run.next()) {
    const int blocks = run.blocks();
    const uint8_t* weights = run.weights();
    PairSums<kTokens, 1, 2> sums;
    sums.clear();
    sums.template add<Layout>(&weights, x, blocks);
    const F32 scale = run.scale();
#pragma GCC unroll 16
    for (int i = 0; i < kTokens; ++i) {
      total[i] = f_fma(f_add(sums.v[i][0][0], sums.v[i][0][1]), scale, total[i]);
      x[i] += blocks * kBlockChannels;
    }
    done += blocks;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kTokens; ++i) f_store(sum_of(job, tile, first_token + i), total[i]);
}

template <class Layout>
void pair_tiles(const TileJob& job) {
  for_token_blocks<PairSource<Layout>::kTokens>(job.m, [&]<int kTokens>(int i) {
    if constexpr (Layout::kHeader != 0) {
      for (int t = 0; t < job.tiles; ++t) multiply_scaled<Layout, kTokens>(job, t, i);
    } else if (job.tiles == 2) {
      multiply_unscaled<Layout, kTokens, 2>(job, i);
    } else {
      multiply_unscaled<Layout, kTokens, 1>(job, i);
    }
  });
}

// Float tile products by bfloat16 pairs on AMX tiles, over Tile = HwTile or EmuTile. Included in
// the anonymous namespace of a translation unit that defines
//   pair_row(act, row)                   where a row of bfloat16 activations begins
//   decode_pairs(layout, block, panel)   a block's codes as bfloat16 pairs, without the scale
//
// All token counts take this path: a tile instruction adds its products in an order of its own, two
// chains of even and odd channels that then join the sum, so few tokens on another instruction
// would have other bits than many. A row of a tile does not know the others: bits do not depend on
// the batch.
//
// Formats without scales stay in the sum over a whole row, and their blocks are operands as they
// lie. Others are summed per run (a K-group, or the next 128 channels of a longer one), and total =
// fma(sum, scale, total), runs ascending.
#pragma once

constexpr int kAmxRunBlocks = 4;     // 128 channels
constexpr int kAmxGatherBlocks = 8;  // activations gathered at a time
constexpr int kPairBlockBytes = kBlockChannels / 2 * 64;

// Blocks [first, first + count) of tokens [token, token + n): x[b * kAmxTokens + i].
inline void gather_pairs(const TileJob& job, int token, int n, int64_t first, int count,
                         uint16_t (*x)[kBlockChannels]) {
  for (int i = 0; i < n; ++i) {
    const int64_t row = job.rows != nullptr ? job.rows[token + i] : token + i;
    const uint16_t* from = pair_row(job.act, row) + first * kBlockChannels;
    for (int b = 0; b < count; ++b)
      std::memcpy(x[b * kAmxTokens + i], from + b * kBlockChannels, sizeof x[0]);
  }
}

template <class Tile, class Layout>
class AmxPairJob {
 public:
  explicit AmxPairJob(const TileJob& job)
      : job_(job),
        work_(*reinterpret_cast<Work*>(job.scratch)),
        out_ld_(kTileChannels * job.tiles) {
    static_assert(sizeof(Work) <= kTileScratchBytes);
  }

  [[gnu::noinline]] void run() {
    if constexpr (Layout::kHeader == 0) {
      for (int token = 0; token < job_.m; token += kAmxTokens) {
        grid_.shape(tokens_from(token), kDepth, job_.tiles);
        grid_.zero();
        multiply_row(token);
      }
    } else {
      for (int inside = 0, done = 0; done < job_.blocks;) {
        const int blocks = std::min(kAmxRunBlocks, job_.tile_blocks - inside);
        multiply_run(done, blocks, inside);
        done += blocks;
        inside += blocks;
        if (inside == job_.tile_blocks) inside = 0;
      }
    }
  }

 private:
  static constexpr int kDepth = 2 * kBlockChannels;  // bytes of a block of activations

  struct alignas(64) Work {
    uint16_t x[kAmxGatherBlocks][kAmxTokens][kBlockChannels];
    uint8_t panel[2][kAmxRunBlocks * kPairBlockBytes];
    float sums[2][kAmxTokens][kTileChannels];
  };

  int tokens_from(int token) const { return std::min(kAmxTokens, job_.m - token); }

  void multiply_row(int token) {
    for (int64_t first = 0; first < job_.blocks; first += kAmxGatherBlocks) {
      const int count = static_cast<int>(std::min<int64_t>(kAmxGatherBlocks, job_.blocks - first));
      gather_pairs(job_, token, tokens_from(token), first, count, work_.x[0]);
      for (int b = 0; b < count; ++b) {
        const int64_t block = (first + b) * Layout::kBlock;
        grid_.template multiply<true>(work_.x[b], kDepth, job_.tile[0] + block,
                                      job_.tile[1] + block);
      }
    }
    float* out = job_.out + token * out_ld_;
    grid_.store(out, out + kTileChannels, out_ld_ * int64_t{sizeof(float)});
  }

  // One run of all tokens; `inside` is its first block inside the tile.
  void multiply_run(int64_t first, int blocks, int inside) {
    const int64_t tile = first / job_.tile_blocks * job_.tile_bytes;
    F32 scale[2];
    for (int t = 0; t < job_.tiles; ++t) {
      const uint8_t* at = job_.tile[t] + tile;
      scale[t] = f_load(reinterpret_cast<const float*>(at));
      for (int b = 0; b < blocks; ++b)
        decode_pairs(Layout{}, at + Layout::kHeader + (inside + b) * Layout::kBlock,
                     work_.panel[t] + b * kPairBlockBytes);
    }
    for (int token = 0; token < job_.m; token += kAmxTokens) {
      const int n = tokens_from(token);
      gather_pairs(job_, token, n, first, blocks, work_.x[0]);
      grid_.shape(n, kDepth, job_.tiles);
      grid_.zero();
      for (int b = 0; b < blocks; ++b)
        grid_.template multiply<true>(work_.x[b], kDepth, work_.panel[0] + b * kPairBlockBytes,
                                      work_.panel[1] + b * kPairBlockBytes);
      grid_.store(work_.sums[0], work_.sums[1], sizeof work_.sums[0][0]);
      for (int i = 0; i < n; ++i)
        for (int t = 0; t < job_.tiles; ++t) {
          float* out = job_.out + (token + i) * out_ld_ + t * kTileChannels;
          const F32 total = first == 0 ? f_zero() : f_load(out);
          f_store(out, f_fma(f_load(work_.sums[t][i]), scale[t], total));
        }
    }
  }

  const TileJob& job_;
  Work& work_;
  const int64_t out_ld_;
  AmxGrid<Tile> grid_;
};

template <class Tile, class Layout>
void amx_pair_tiles(const TileJob& job) {
  AmxPairJob<Tile, Layout>(job).run();
}

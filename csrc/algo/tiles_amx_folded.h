// Integer tile products of many tokens with scales folded into bfloat16 weights: faster than
// tiles_amx.h, whose sums stop for a float step every 32 channels, and rounded differently. A job
// comes here only if it brings bfloat16 activations beside its bytes (see algo/activations.h),
// which it does where same_bits() is off. Included as tiles_amx_pairs.h is, in a translation unit
// that also defines
//   store_pairs(p, even, odd)   two channels of sixteen outputs rounded to bfloat16 pairs
#pragma once

constexpr int kAmxFoldTokens = 32;  // more than these repay the decoding
constexpr int kAmxFoldBlocks = 8;   // decoded at a time

// Blocks [first, first + count) of one row tile as bfloat16 pairs: step * (code - zero), or
// step * code + minimum, rounded once to float32 and once to bfloat16.
template <class Layout>
void amx_fold(const TileJob& job, int t, int64_t first, int count, uint8_t* panel) {
  constexpr int kQuads = 8 / Layout::kSteps;
  int b = static_cast<int>(first % job.tile_blocks);
  const uint8_t* tile = job.tile[t] + first / job.tile_blocks * job.tile_bytes;
  const F32 zero = f_set1(-float(Layout::kZero));
  for (int done = 0; done < count; b = 0, tile += job.tile_bytes) {
    const Decoder<Layout> decoder(tile);
    for (; b < job.tile_blocks && done < count; ++b, ++done) {
      U8 codes[8];
      Decoder<Layout>::codes(tile + Layout::kHeader + int64_t{b} * Layout::kBlock, codes);
      F32 step[Layout::kSteps], minimum[Layout::kSteps];
      decoder.scales(tile, b, step, minimum);
      for (int j = 0; j < 8; ++j, panel += 128) {
        alignas(64) int32_t quad[16];
        u8_store(reinterpret_cast<uint8_t*>(quad), codes[j]);
        const I32 bytes = i_load(quad);
        F32 w[4];
        for (int i = 0; i < 4; ++i) {
          w[i] = f_from_i(i_take_bits(bytes, 8 * i, 255));
          if constexpr (Layout::kMin) {
            w[i] = f_fma(step[j / kQuads], w[i], minimum[j / kQuads]);
          } else {
            w[i] = f_mul(step[j / kQuads], f_add(w[i], zero));
          }
        }
        store_pairs(panel, w[0], w[1]);
        store_pairs(panel + 64, w[2], w[3]);
      }
    }
  }
}

template <class Tile>
class AmxFoldedJob {
 public:
  using Fold = void (*)(const TileJob&, int t, int64_t first, int count, uint8_t* panel);

  AmxFoldedJob(const TileJob& job, Fold fold)
      : job_(job),
        fold_(fold),
        work_(*reinterpret_cast<Work*>(job.scratch)),
        out_ld_(kTileChannels * job.tiles) {
    static_assert(sizeof(Work) <= kTileScratchBytes);
  }

  [[gnu::noinline]] void run() {
    for (int64_t first = 0; first < job_.blocks; first += kAmxFoldBlocks) {
      const int count = static_cast<int>(std::min<int64_t>(kAmxFoldBlocks, job_.blocks - first));
      for (int t = 0; t < job_.tiles; ++t) fold_(job_, t, first, count, work_.panel[t]);
      for (int token = 0; token < job_.m; token += kAmxTokens) multiply(first, count, token);
    }
  }

 private:
  struct alignas(64) Work {
    uint16_t x[kAmxFoldBlocks][kAmxTokens][kBlockChannels];
    uint8_t panel[2][kAmxFoldBlocks * kPairBlockBytes];
  };

  void multiply(int64_t first, int count, int token) {
    const int n = std::min(kAmxTokens, job_.m - token);
    gather_pairs(job_, token, n, first, count, work_.x[0]);
    grid_.shape(n, 2 * kBlockChannels, job_.tiles);
    float* out = job_.out + token * out_ld_;
    const int64_t stride = out_ld_ * int64_t{sizeof(float)};
    if (first == 0) {
      grid_.zero();
    } else {
      grid_.load(out, out + kTileChannels, stride);
    }
    for (int b = 0; b < count; ++b)
      grid_.template multiply<true>(work_.x[b], 2 * kBlockChannels,
                                    work_.panel[0] + b * kPairBlockBytes,
                                    work_.panel[1] + b * kPairBlockBytes);
    grid_.store(out, out + kTileChannels, stride);
  }

  const TileJob& job_;
  Fold fold_;
  Work& work_;
  const int64_t out_ld_;
  AmxGrid<Tile> grid_;
};

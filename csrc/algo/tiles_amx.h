// Integer tile products on AMX tiles, over Tile = HwTile or EmuTile. Included in the anonymous
// namespace of a translation unit that defines `few_tokens(kind)`: the tile kernels of the table
// below this one, which take over where a job has too few tokens to fill tiles. Same bits, so the
// choice is free.
//
// A matrix product of up to 32 tokens x 32 output channels x one block of 32 input channels: two
// tiles of activations (a row is a token), two of codes (a row is four input channels of sixteen
// outputs: a decoded block as it lies), four of exact 32-bit sums. Then the float steps of
// tiles_int.h, in the same order. A block fills half of a tile's depth, and every block needs its
// step over the whole sum: both are the price of scales per 32 channels.
#pragma once

constexpr int kAmxBlocks = 16;    // blocks of 32 input channels decoded at a time
constexpr int kAmxFewTokens = 8;  // up to here the table below is used

// Some blocks of one row tile, decoded.
template <int kSteps>
struct AmxBlocks {
  uint8_t codes[kAmxBlocks][8][64];
  float step[kAmxBlocks][kSteps][16];
  float minimum[kAmxBlocks][kSteps][16];
};

template <class Layout>
void amx_decode(const TileJob& job, int t, int64_t first, int count,
                AmxBlocks<Layout::kSteps>& out) {
  int b = static_cast<int>(first % job.tile_blocks);
  const uint8_t* tile = job.tile[t] + first / job.tile_blocks * job.tile_bytes;
  for (int done = 0; done < count; b = 0, tile += job.tile_bytes) {
    const Decoder<Layout> decoder(tile);
    for (; b < job.tile_blocks && done < count; ++b, ++done) {
      U8 codes[8];
      Decoder<Layout>::codes(tile + Layout::kHeader + int64_t{b} * Layout::kBlock, codes);
      for (int j = 0; j < 8; ++j) u8_store(out.codes[done][j], codes[j]);
      F32 step[Layout::kSteps], minimum[Layout::kSteps];
      decoder.scales(tile, b, step, minimum);
      for (int s = 0; s < Layout::kSteps; ++s) {
        f_store(out.step[done][s], step[s]);
        if constexpr (Layout::kMin) f_store(out.minimum[done][s], minimum[s]);
      }
    }
  }
}

// One job. Formats differ in their decoder alone, so they share this by kSteps and kMin.
template <class Tile, int kSteps, bool kMin>
class AmxIntJob {
 public:
  using Decode = void (*)(const TileJob&, int t, int64_t first, int count, AmxBlocks<kSteps>&);

  AmxIntJob(const TileJob& job, Decode decode)
      : job_(job), decode_(decode), work_(*reinterpret_cast<Work*>(job.scratch)) {
    static_assert(sizeof(Work) <= kTileScratchBytes);
  }

  // Out of line, so that formats share it.
  [[gnu::noinline]] void run() {
    const int64_t out_floats = int64_t{kTileChannels} * job_.tiles * job_.m;
    for (int64_t i = 0; i < out_floats; i += 16) f_store(job_.out + i, f_zero());
    for (int64_t first = 0; first < job_.blocks; first += kAmxBlocks) {
      const int count = static_cast<int>(std::min<int64_t>(kAmxBlocks, job_.blocks - first));
      for (int t = 0; t < job_.tiles; ++t) decode_(job_, t, first, count, work_.weights[t]);
      for (int token = 0; token < job_.m; token += kAmxTokens)
        multiply(first, count, token, std::min(kAmxTokens, job_.m - token));
    }
  }

 private:
  static constexpr int kDepth = kBlockChannels / kSteps;  // input channels per step
  static constexpr int kQuads = kDepth / 4;

  struct alignas(64) Work {
    AmxBlocks<kSteps> weights[2];
    int8_t q[kAmxBlocks][kAmxTokens][kBlockChannels];
    int32_t dots[kSteps][2][kAmxTokens][16];  // by step and channel tile
  };

  // Activation codes of some tokens: strides between tokens and between blocks.
  struct Operand {
    const int8_t* q;
    int64_t token_stride, block_stride;
  };

  // Tokens [token, token + n) against `count` decoded blocks; continues the sums in out.
  void multiply(int64_t first, int count, int token, int n) {
    grid_.shape(n, kDepth, job_.tiles);
    const ActivationBlock* x[kAmxTokens];
    for (int i = 0; i < n; ++i) {
      const int64_t row = job_.rows != nullptr ? job_.rows[token + i] : token + i;
      x[i] = job_.act.packed + row * job_.act.blocks + first;
    }
    const Operand a = operand(x, n, count);
    float* out = job_.out + int64_t{token} * kTileChannels * job_.tiles;
    for (int b = 0; b < count; ++b) {
      for (int s = 0; s < kSteps; ++s) dot(a, b, s);
      for (int t = 0; t < job_.tiles; ++t) step(x, n, b, t, out + t * kTileChannels);
    }
  }

  // Rows one after the other are read where they are, others gathered.
  Operand operand(const ActivationBlock* const* x, int n, int count) {
    bool adjacent = true;
    for (int i = 1; i < n; ++i) adjacent &= x[i] == x[0] + i * job_.act.blocks;
    if (adjacent)
      return {x[0]->q, job_.act.blocks * int64_t{sizeof(ActivationBlock)}, sizeof(ActivationBlock)};
    for (int b = 0; b < count; ++b)
      for (int i = 0; i < n; ++i) std::memcpy(work_.q[b][i], x[i][b].q, kBlockChannels);
    return {work_.q[0][0], kBlockChannels, sizeof work_.q[0]};
  }

  // work_.dots[s] = activations x codes of one block.
  void dot(const Operand& a, int b, int s) {
    grid_.zero();
    grid_.template multiply<false>(a.q + b * a.block_stride + s * kDepth, a.token_stride,
                                   work_.weights[0].codes[b][s * kQuads],
                                   work_.weights[1].codes[b][s * kQuads]);
    grid_.store(work_.dots[s][0], work_.dots[s][1], 64);
  }

  // The float steps of block b and channel tile t.
  void step(const ActivationBlock* const* x, int n, int b, int t, float* out) {
    const AmxBlocks<kSteps>& weights = work_.weights[t];
    F32 scale[kSteps], minimum[kSteps];
    for (int s = 0; s < kSteps; ++s) {
      scale[s] = f_load(weights.step[b][s]);
      if constexpr (kMin) minimum[s] = f_load(weights.minimum[b][s]);
    }
    for (int i = 0; i < n; ++i, out += kTileChannels * job_.tiles) {
      const ActivationBlock& block = x[i][b];
      const F32 x_scale = f_set1(block.scale);
      F32 acc = f_load(out);
#pragma GCC unroll 2
      for (int s = 0; s < kSteps; ++s) {
        I32 sum = i_load(work_.dots[s][t][i]);
        if constexpr (!kMin) sum = i_add(sum, i_set1(block.init[s]));
        acc = f_fma(f_from_i(sum), f_mul(scale[s], x_scale), acc);
      }
      if constexpr (kMin) {
#pragma GCC unroll 2
        for (int s = 0; s < kSteps; ++s) acc = f_fma(minimum[s], f_set1(block.sum[s]), acc);
      }
      f_store(out, acc);
    }
  }

  const TileJob& job_;
  Decode decode_;
  Work& work_;
  AmxGrid<Tile> grid_;
};

template <class Tile, FormatKind kKind, class Layout>
void amx_int_tiles(const TileJob& job) {
  if (job.m <= kAmxFewTokens) return few_tokens(kKind)(job);
  if (job.act.x != nullptr && job.m > kAmxFoldTokens)
    return AmxFoldedJob<Tile>(job, amx_fold<Layout>).run();
  AmxIntJob<Tile, Layout::kSteps, Layout::kMin>(job, amx_decode<Layout>).run();
}

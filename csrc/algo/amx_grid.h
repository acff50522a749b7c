// A product of up to two token tiles x two channel tiles on the eight AMX tile registers, over Tile
// = HwTile or EmuTile. Included in the anonymous namespace of each translation unit with AMX
// kernels.
#pragma once

constexpr int kAmxTileTokens = 16;  // rows of a tile
constexpr int kAmxTokens = 2 * kAmxTileTokens;

// Products of up to 32 tokens x 32 output channels, on all eight tile registers.
template <class Tile>
class AmxGrid {
 public:
  // Up to here rows of `depth` bytes are multiplied: of n tokens, for one or two tiles of channels.
  void shape(int n, int depth, int channel_tiles) {
    two_channels_ = channel_tiles == 2;
    if (n == tokens_ && depth == depth_) return;
    tokens_ = n;
    depth_ = depth;
    two_tokens_ = n > kAmxTileTokens;
    TileConfig config;
    for (const int tile : {kB0, kB1}) config.set(tile, depth / 4, 64);
    const int rows[2] = {std::min(n, kAmxTileTokens), std::max(0, n - kAmxTileTokens)};
    for (int i = 0; i < 1 + two_tokens_; ++i) {
      for (const int tile : {kC00 + 2 * i, kC01 + 2 * i}) config.set(tile, rows[i], 64);
      config.set(kA0 + i, rows[i], depth);
    }
    tile_.configure(config);
  }

  void zero() {
    tile_.template zero<kC00>();
    tile_.template zero<kC01>();
    if (!two_tokens_) return;
    tile_.template zero<kC10>();
    tile_.template zero<kC11>();
  }

  // Adds a x b: a holds the tokens `a_stride` bytes apart, b0 and b1 (unless there is one tile of
  // channels) depth / 4 rows of 64 bytes.
  template <bool kBf16>
  void multiply(const void* a, int64_t a_stride, const void* b0, const void* b1) {
    tile_.template load<kB0>(b0, 64);
    if (two_channels_) tile_.template load<kB1>(b1, 64);
    tile_.template load<kA0>(a, a_stride);
    dot<kBf16, kC00, kA0, kB0>();
    if (two_channels_) dot<kBf16, kC01, kA0, kB1>();
    if (!two_tokens_) return;
    tile_.template load<kA1>(static_cast<const std::byte*>(a) + kAmxTileTokens * a_stride,
                             a_stride);
    dot<kBf16, kC10, kA1, kB0>();
    if (two_channels_) dot<kBf16, kC11, kA1, kB1>();
  }

  // Takes sums up where store() left them.
  void load(const void* c0, const void* c1, int64_t stride) {
    tile_.template load<kC00>(c0, stride);
    if (two_channels_) tile_.template load<kC01>(c1, stride);
    if (!two_tokens_) return;
    const int64_t below = kAmxTileTokens * stride;
    tile_.template load<kC10>(static_cast<const std::byte*>(c0) + below, stride);
    if (two_channels_) tile_.template load<kC11>(static_cast<const std::byte*>(c1) + below, stride);
  }

  // The sums, rows `stride` bytes apart, by tile of channels.
  void store(void* c0, void* c1, int64_t stride) {
    tile_.template store<kC00>(c0, stride);
    if (two_channels_) tile_.template store<kC01>(c1, stride);
    if (!two_tokens_) return;
    const int64_t below = kAmxTileTokens * stride;
    tile_.template store<kC10>(static_cast<std::byte*>(c0) + below, stride);
    if (two_channels_) tile_.template store<kC11>(static_cast<std::byte*>(c1) + below, stride);
  }

  // `rounds` of four independent products of whatever the operands hold.
  template <bool kBf16>
  void spin(int64_t rounds) {
    for (int64_t r = 0; r < rounds; ++r) {
      dot<kBf16, kC00, kA0, kB0>();
      dot<kBf16, kC01, kA0, kB1>();
      dot<kBf16, kC10, kA1, kB0>();
      dot<kBf16, kC11, kA1, kB1>();
    }
  }

 private:
  // Sums of token tile i and channel tile j are C[ij].
  enum { kC00, kC01, kC10, kC11, kA0, kA1, kB0, kB1 };

  template <bool kBf16, int kC, int kA, int kB>
  void dot() {
    if constexpr (kBf16) {
      tile_.template dot_bf16<kC, kA, kB>();
    } else {
      tile_.template dot_su<kC, kA, kB>();
    }
  }

  Tile tile_;
  int tokens_ = 0, depth_ = 0;
  bool two_tokens_ = false, two_channels_ = false;
};

// Multiply-adds of `rounds` of four independent tile products.
template <class Tile, bool kBf16>
int64_t amx_peak(int64_t rounds) {
  AmxGrid<Tile> grid;
  grid.shape(kAmxTokens, 64, 2);
  grid.template spin<kBf16>(rounds);
  return rounds * 4 * 16 * 16 * (kBf16 ? 32 : 64);
}

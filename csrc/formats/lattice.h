// Tiles of ggml's IQ types: 16 output channels x 256 input channels whose weights, eight or four
// at a time, are points of a published grid. Tiles keep the numbers of the points, so they are
// about as small as the files; kernels look the points up.
//
// Every tile begins with f16 d[16] and the scales s: 4 bits for each 32 input channels (kSteps 1)
// or 16 (kSteps 2); nibble i % 2 of u8 [i / 2][16] is that of sub-block i.
//   value = d * kUnit * (2 s + 1) * (code - kZero)
//
// clang-format off
//   iq2xxs   numbers, signs        d / 8 * (2 s + 1) * +-level                        (ggml IQ2_XXS)
//   iq2xs    numbers of 9 bits, signs; as iq2xxs                                      (ggml IQ2_XS)
//   iq2s     numbers of 10 bits, signs; as iq2xxs                                     (ggml IQ2_S)
//   iq3xxs   numbers of fours, signs; d / 4 * (2 s + 1) * +-level                     (ggml IQ3_XXS)
//   iq3s     numbers of fours of 9 bits, signs; d * (2 s + 1) * +-level               (ggml IQ3_S)
//
//   iq1s     numbers of 11 bits, 1 minus; d / 8 * (2 s + 1) * (8 * level - 8 +- 1)    (ggml IQ1_S)
//   iq1m     numbers of 11 bits, 4 minus; as iq1s                                     (ggml IQ1_M)
//
//   numbers  64 B: byte c * 4 + l is the point of k = 8l .. 8l + 7; of fours 128 B: byte
//            h * 64 + c * 4 + l is the point of k = 16h + 4l .. 16h + 4l + 3
//   bits     8 B for each bit of the numbers above the eighth: bit l % 2 * 32 + c * 2 + l / 2; of
//            fours those of h = 0 first, then those of h = 1
//   signs    64 B: byte c * 4 + i, bit j: k = 4j + i is negative
//   n minus  u16 [n]: bit c of the one that k * n / 32 names: -1, not +1
// clang-format on
#pragma once

#include <cstdint>

namespace moestro {

#define MOESTRO_GRID(name, points, ...) \
  alignas(64) inline constexpr uint16_t name[points] = {__VA_ARGS__};
#include "formats/lattice_grids.def"
#undef MOESTRO_GRID

// kHigh: bits of a point's number above eight. kRow: weights per point. kLevels: what the levels of
// a point stand for. kMinus: masks of lanes whose codes are two less, instead of signs.
struct LatticeLayout {
  static constexpr bool kFloat = false, kMin = false;
  static constexpr int kTileBlocks = 8, kRow = 8, kHigh = 0, kMinus = 0;
};

struct Iq2xxsLayout : LatticeLayout {
  static constexpr int kHeader = 96, kBlock = 128;
  static constexpr int kBits = 8, kSteps = 1, kZero = 43;
  static constexpr float kUnit = 0.125f;
  static constexpr int8_t kLevels[8] = {8, 25, 43};
  static constexpr const uint16_t* kGrid = kGridIq2xxs;
};
struct Iq2xsLayout : Iq2xxsLayout {
  static constexpr int kHeader = 160, kBlock = 136, kSteps = 2, kHigh = 1;
  static constexpr const uint16_t* kGrid = kGridIq2xs;
};
struct Iq2sLayout : Iq2xxsLayout {
  static constexpr int kHeader = 160, kBlock = 144, kSteps = 2, kHigh = 2;
  static constexpr const uint16_t* kGrid = kGridIq2s;
};
struct Iq3xxsLayout : LatticeLayout {
  static constexpr int kHeader = 96, kBlock = 192, kRow = 4;
  static constexpr int kBits = 8, kSteps = 1, kZero = 62;
  static constexpr float kUnit = 0.25f;
  static constexpr int8_t kLevels[8] = {4, 12, 20, 28, 36, 44, 52, 62};
  static constexpr const uint16_t* kGrid = kGridIq3xxs;
};
struct Iq3sLayout : LatticeLayout {
  static constexpr int kHeader = 96, kBlock = 208, kRow = 4, kHigh = 1;
  static constexpr int kBits = 6, kSteps = 1, kZero = 15;
  static constexpr float kUnit = 1.0f;
  static constexpr int8_t kLevels[8] = {1, 3, 5, 7, 9, 11, 13, 15};
  static constexpr const uint16_t* kGrid = kGridIq3s;
};

struct Iq1sLayout : LatticeLayout {
  static constexpr int kHeader = 96, kBlock = 90, kHigh = 3, kMinus = 1;
  static constexpr int kBits = 6, kSteps = 1, kZero = 9;
  static constexpr float kUnit = 0.125f;
  static constexpr int8_t kLevels[8] = {-7, 1, 9};
  static constexpr const uint16_t* kGrid = kGridIq1;
};
struct Iq1mLayout : Iq1sLayout {
  static constexpr int kHeader = 160, kBlock = 96, kSteps = 2, kMinus = 4;
};

// Bytes from the start of a block to the high bits of numbers, and to what follows them.
template <class Layout>
constexpr int lattice_bits_at() {
  return 512 / Layout::kRow;
}
template <class Layout>
constexpr int lattice_signs_at() {
  return (512 + 64 * Layout::kHigh) / Layout::kRow;
}
static_assert(lattice_signs_at<Iq2xxsLayout>() + 64 == Iq2xxsLayout::kBlock);
static_assert(lattice_signs_at<Iq2xsLayout>() + 64 == Iq2xsLayout::kBlock);
static_assert(lattice_signs_at<Iq2sLayout>() + 64 == Iq2sLayout::kBlock);
static_assert(lattice_signs_at<Iq3xxsLayout>() + 64 == Iq3xxsLayout::kBlock);
static_assert(lattice_signs_at<Iq3sLayout>() + 64 == Iq3sLayout::kBlock);

static_assert(lattice_signs_at<Iq1sLayout>() + 2 == Iq1sLayout::kBlock);
static_assert(lattice_signs_at<Iq1mLayout>() + 8 == Iq1mLayout::kBlock);

// Where number l of channel c has its high bit, of the 64 of a plane.
constexpr int lattice_bit(int l, int c) { return l % 2 * 32 + c * 2 + l / 2; }

// The level of channel k and lane c of a block: its place in kLevels.
template <class Layout>
int lattice_level(const uint8_t* block, int k, int c) {
  const int row = k / Layout::kRow, half = row / 4, l = row % 4, bit = lattice_bit(l, c);
  const uint8_t* bits = block + lattice_bits_at<Layout>() + half * 8 * Layout::kHigh;
  int number = block[half * 64 + c * 4 + l];
  for (int p = 0; p < Layout::kHigh; ++p)
    number |= (bits[8 * p + bit / 8] >> (bit % 8) & 1) << (8 + p);
  const int point = Layout::kGrid[number];
  if constexpr (Layout::kRow == 8) {
    return point >> (2 * (k % 8)) & 3;
  } else {
    constexpr int kShift[4] = {0, 8, 4, 12};
    return point >> kShift[k % 4] & 7;
  }
}

// code - kZero of channel k and lane c of a block.
template <class Layout>
int lattice_value(const uint8_t* block, int k, int c) {
  const int level = Layout::kLevels[lattice_level<Layout>(block, k, c)];
  const uint8_t* more = block + lattice_signs_at<Layout>();
  if constexpr (Layout::kMinus > 0) {
    return level - 2 * (more[k * Layout::kMinus / 32 * 2 + c / 8] >> (c % 8) & 1);
  } else {
    return more[c * 4 + k % 4] >> (k / 4) & 1 ? -level : level;
  }
}

// 2 s + 1 of the sub-block that channel k of block b belongs to.
template <class Layout>
int lattice_scale(const uint8_t* tile, int b, int k, int c) {
  const int sub = b * Layout::kSteps + k / (32 / Layout::kSteps);
  return 2 * (tile[32 + sub / 2 * 16 + c] >> (sub % 2 * 4) & 15) + 1;
}

}  // namespace moestro

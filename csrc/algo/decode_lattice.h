// Decoders of the lattice formats (formats/lattice.h). Included in each ISA's anonymous namespace.
#pragma once

// Levels as codes, where u8_spread_pairs and u8_spread_nibbles put them.
template <class Layout>
constexpr LutBytes make_level_lut() {
  LutBytes lut{};
  if constexpr (Layout::kRow == 4) {
    for (int i = 0; i < 8; ++i) lut.v[i] = static_cast<uint8_t>(Layout::kZero + Layout::kLevels[i]);
  } else {
    for (int i = 0; i < 4; ++i)
      lut.v[i] = lut.v[4 * i] = static_cast<uint8_t>(Layout::kZero + Layout::kLevels[i]);
  }
  return lut;
}

// The codes of positive weights.
template <class Layout>
inline void level_codes(const uint8_t* block, U8 codes[8]) {
  static constexpr LutBytes kLut = make_level_lut<Layout>();
  const uint8_t* bits = block + lattice_bits_at<Layout>();
  U8 even, odd;
  u8_lookup_words<Layout::kHigh>(Layout::kGrid, block, bits, even, odd);
  if constexpr (Layout::kRow == 8) {
    codes[0] = u8_spread_pairs<0>(even);
    codes[1] = u8_spread_pairs<1>(even);
    codes[2] = u8_spread_pairs<0>(odd);
    codes[3] = u8_spread_pairs<1>(odd);
    codes[4] = u8_spread_pairs<2>(even);
    codes[5] = u8_spread_pairs<3>(even);
    codes[6] = u8_spread_pairs<2>(odd);
    codes[7] = u8_spread_pairs<3>(odd);
  } else {
    codes[0] = u8_spread_nibbles<0>(even);
    codes[1] = u8_spread_nibbles<0>(odd);
    codes[2] = u8_spread_nibbles<1>(even);
    codes[3] = u8_spread_nibbles<1>(odd);
    u8_lookup_words<Layout::kHigh>(Layout::kGrid, block + 64, bits + 8 * Layout::kHigh, even, odd);
    codes[4] = u8_spread_nibbles<0>(even);
    codes[5] = u8_spread_nibbles<0>(odd);
    codes[6] = u8_spread_nibbles<1>(even);
    codes[7] = u8_spread_nibbles<1>(odd);
  }
  for (int j = 0; j < 8; ++j) codes[j] = u8_lookup(codes[j], kLut.v);
}

template <int kTwice>
inline void apply_signs(const U8& signs, U8 codes[8]) {
  codes[0] = u8_mirror<0>(codes[0], signs, kTwice);
  codes[1] = u8_mirror<1>(codes[1], signs, kTwice);
  codes[2] = u8_mirror<2>(codes[2], signs, kTwice);
  codes[3] = u8_mirror<3>(codes[3], signs, kTwice);
  codes[4] = u8_mirror<4>(codes[4], signs, kTwice);
  codes[5] = u8_mirror<5>(codes[5], signs, kTwice);
  codes[6] = u8_mirror<6>(codes[6], signs, kTwice);
  codes[7] = u8_mirror<7>(codes[7], signs, kTwice);
}

// Two less in the lanes of the kCount masks, each for 8 / kCount registers.
template <int kCount>
inline void subtract_minus(const uint8_t* masks, U8 codes[8]) {
  for (int m = 0; m < kCount; ++m) {
    uint16_t lanes;
    std::memcpy(&lanes, masks + 2 * m, 2);
    const U8 two = u8_lanes(lanes, 2);
    for (int j = 8 / kCount * m; j < 8 / kCount * (m + 1); ++j) codes[j] = u8_sub(codes[j], two);
  }
}

// step[s] = unit * (2 scale + 1), the scales as nibbles.
template <int kSteps>
inline void nibble_scales(const uint8_t* tile, int b, F32 unit, F32 step[kSteps]) {
  const F32 one = f_set1(1.0f), two = f_set1(2.0f);
  if constexpr (kSteps == 1) {
    const I32 both = i_load_u8(tile + 32 + b / 2 * 16);
    step[0] = f_mul(unit, f_fma(f_from_i(i_take_bits(both, b % 2 * 4, 15)), two, one));
  } else {
    const I32 both = i_load_u8(tile + 32 + b * 16);
    step[0] = f_mul(unit, f_fma(f_from_i(i_take_bits(both, 0, 15)), two, one));
    step[1] = f_mul(unit, f_fma(f_from_i(i_take_bits(both, 4, 15)), two, one));
  }
}

template <class Layout>
  requires(Layout::kHigh >= 0)
struct Decoder<Layout> {
  F32 unit;
  explicit Decoder(const uint8_t* tile)
      : unit(f_mul(f_load_f16_bytes(tile), f_set1(Layout::kUnit))) {}
  void scales(const uint8_t* tile, int b, F32 step[Layout::kSteps], F32*) const {
    nibble_scales<Layout::kSteps>(tile, b, unit, step);
  }
  static void codes(const uint8_t* block, U8 codes[8]) {
    level_codes<Layout>(block, codes);
    if constexpr (Layout::kMinus > 0) {
      subtract_minus<Layout::kMinus>(block + lattice_signs_at<Layout>(), codes);
    } else {
      apply_signs<2 * Layout::kZero>(u8_load(block + lattice_signs_at<Layout>()), codes);
    }
  }
};

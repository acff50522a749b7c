// Decoders: one tile of each format as codes and per-block scales. Included in each ISA's anonymous
// namespace. A format is one layout struct (formats/layouts.h) and one specialization here.
#pragma once

inline void nibble_codes(const uint8_t* block, U8 codes[8]) {
  for (int j = 0; j < 4; ++j) {
    const U8 bytes = u8_load(block + 64 * j);
    codes[j] = u8_low_nibbles(bytes);
    codes[4 + j] = u8_high_nibbles(bytes);
  }
}

// codes[j] |= two bits of a pair plane, or one bit of a bit plane, as bits kTo and up.
template <int kTo>
inline void add_pair_plane(const uint8_t* plane, U8 codes[8]) {
  const U8 first = u8_load(plane), second = u8_load(plane + 64);
  codes[0] = u8_add_bits<2, 0, kTo>(codes[0], first);
  codes[1] = u8_add_bits<2, 2, kTo>(codes[1], first);
  codes[2] = u8_add_bits<2, 4, kTo>(codes[2], first);
  codes[3] = u8_add_bits<2, 6, kTo>(codes[3], first);
  codes[4] = u8_add_bits<2, 0, kTo>(codes[4], second);
  codes[5] = u8_add_bits<2, 2, kTo>(codes[5], second);
  codes[6] = u8_add_bits<2, 4, kTo>(codes[6], second);
  codes[7] = u8_add_bits<2, 6, kTo>(codes[7], second);
}
template <int kTo>
inline void add_bit_plane(const uint8_t* plane, U8 codes[8]) {
  const U8 bits = u8_load(plane);
  codes[0] = u8_add_bits<1, 0, kTo>(codes[0], bits);
  codes[1] = u8_add_bits<1, 1, kTo>(codes[1], bits);
  codes[2] = u8_add_bits<1, 2, kTo>(codes[2], bits);
  codes[3] = u8_add_bits<1, 3, kTo>(codes[3], bits);
  codes[4] = u8_add_bits<1, 4, kTo>(codes[4], bits);
  codes[5] = u8_add_bits<1, 5, kTo>(codes[5], bits);
  codes[6] = u8_add_bits<1, 6, kTo>(codes[6], bits);
  codes[7] = u8_add_bits<1, 7, kTo>(codes[7], bits);
}
inline void pair_codes(const uint8_t* plane, U8 codes[8]) {
  const U8 first = u8_load(plane), second = u8_load(plane + 64);
  codes[0] = u8_take_bits2<0>(first);
  codes[1] = u8_take_bits2<2>(first);
  codes[2] = u8_take_bits2<4>(first);
  codes[3] = u8_take_bits2<6>(first);
  codes[4] = u8_take_bits2<0>(second);
  codes[5] = u8_take_bits2<2>(second);
  codes[6] = u8_take_bits2<4>(second);
  codes[7] = u8_take_bits2<6>(second);
}

// The values of a table format as unsigned bytes.
struct LutBytes {
  uint8_t v[16];
};
template <class Layout>
constexpr LutBytes make_lut() {
  LutBytes lut{};
  for (int i = 0; i < 16; ++i) lut.v[i] = static_cast<uint8_t>(Layout::kValues[i] + Layout::kZero);
  return lut;
}
template <class Layout>
inline void lut_codes(const uint8_t* block, U8 codes[8]) {
  static constexpr LutBytes kLut = make_lut<Layout>();
  nibble_codes(block, codes);
  for (int j = 0; j < 8; ++j) codes[j] = u8_lookup(codes[j], kLut.v);
}

inline F32 f_load_f16_bytes(const uint8_t* p) {
  return f_load_f16(reinterpret_cast<const uint16_t*>(p));
}

// Constructed per tile; scales(b) and codes(block) per block of 32 channels. A minimum goes with
// each step, and is left alone by formats without.
template <class Layout>
struct Decoder;

template <>
struct Decoder<Int8Layout> {
  F32 scale;
  explicit Decoder(const uint8_t* tile) : scale(f_load_f16_bytes(tile)) {}
  void scales(const uint8_t*, int, F32 step[1], F32*) const { step[0] = scale; }
  static void codes(const uint8_t* block, U8 codes[8]) {
    for (int j = 0; j < 8; ++j) codes[j] = u8_load(block + 64 * j);
  }
};

template <>
struct Decoder<Int4Layout> {
  F32 scale;
  explicit Decoder(const uint8_t* tile) : scale(f_load_f16_bytes(tile)) {}
  void scales(const uint8_t*, int, F32 step[1], F32*) const { step[0] = scale; }
  static void codes(const uint8_t* block, U8 codes[8]) { nibble_codes(block, codes); }
};

template <>
struct Decoder<Int4ZeroLayout> {
  F32 scale, low;
  explicit Decoder(const uint8_t* tile)
      : scale(f_load_f16_bytes(tile)), low(f_mul(scale, f_sub(f_zero(), f_load_u8(tile + 32)))) {}
  void scales(const uint8_t*, int, F32 step[1], F32 minimum[1]) const {
    step[0] = scale;
    minimum[0] = low;
  }
  static void codes(const uint8_t* block, U8 codes[8]) { nibble_codes(block, codes); }
};

template <>
struct Decoder<Int8ZeroLayout> : Decoder<Int4ZeroLayout> {
  using Decoder<Int4ZeroLayout>::Decoder;
  static void codes(const uint8_t* block, U8 codes[8]) { Decoder<Int8Layout>::codes(block, codes); }
};

template <>
struct Decoder<Int4MinLayout> {
  F32 scale, low;
  explicit Decoder(const uint8_t* tile)
      : scale(f_load_f16_bytes(tile)), low(f_load_f16_bytes(tile + 32)) {}
  void scales(const uint8_t*, int, F32 step[1], F32 minimum[1]) const {
    step[0] = scale;
    minimum[0] = low;
  }
  static void codes(const uint8_t* block, U8 codes[8]) { nibble_codes(block, codes); }
};

template <>
struct Decoder<Int5Layout> : Decoder<Int4Layout> {
  using Decoder<Int4Layout>::Decoder;
  static void codes(const uint8_t* block, U8 codes[8]) {
    nibble_codes(block, codes);
    add_bit_plane<4>(block + 256, codes);
  }
};

template <>
struct Decoder<Int5MinLayout> : Decoder<Int4MinLayout> {
  using Decoder<Int4MinLayout>::Decoder;
  static void codes(const uint8_t* block, U8 codes[8]) { Decoder<Int5Layout>::codes(block, codes); }
};

template <>
struct Decoder<Lut4NlLayout> : Decoder<Int4Layout> {
  using Decoder<Int4Layout>::Decoder;
  static void codes(const uint8_t* block, U8 codes[8]) { lut_codes<Lut4NlLayout>(block, codes); }
};

template <>
struct Decoder<Mxfp4Layout> {
  F32 scale;
  explicit Decoder(const uint8_t* tile)
      : scale(f_ldexp(f_set1(1.0f), f_sub(f_load_u8(tile), f_set1(128.0f)))) {}
  void scales(const uint8_t*, int, F32 step[1], F32*) const { step[0] = scale; }
  static void codes(const uint8_t* block, U8 codes[8]) { lut_codes<Mxfp4Layout>(block, codes); }
};

template <>
struct Decoder<Nvfp4Layout> {
  explicit Decoder(const uint8_t*) {}
  void scales(const uint8_t* tile, int b, F32 step[2], F32*) const {
    const F32 half = f_set1(128.0f);  // and the 2^8 that f_load_e4m3_256th leaves out
    step[0] = f_mul(f_load_e4m3_256th(tile + 32 * b), half);
    step[1] = f_mul(f_load_e4m3_256th(tile + 32 * b + 16), half);
  }
  static void codes(const uint8_t* block, U8 codes[8]) { lut_codes<Nvfp4Layout>(block, codes); }
};

template <>
struct Decoder<TernaryLayout> : Decoder<Int4Layout> {
  using Decoder<Int4Layout>::Decoder;
  static void codes(const uint8_t* block, U8 codes[8]) { pair_codes(block, codes); }
};

template <>
struct Decoder<Nvfp4ScaledLayout> {
  F32 d;  // times the 2^8 that f_load_e4m3_256th leaves out: exact
  explicit Decoder(const uint8_t* tile)
      : d(f_mul(f_load(reinterpret_cast<const float*>(tile)), f_set1(256.0f))) {}
  void scales(const uint8_t* tile, int b, F32 step[2], F32*) const {
    step[0] = f_mul(f_load_e4m3_256th(tile + 64 + 32 * b), d);
    step[1] = f_mul(f_load_e4m3_256th(tile + 80 + 32 * b), d);
  }
  static void codes(const uint8_t* block, U8 codes[8]) {
    lut_codes<Nvfp4ScaledLayout>(block, codes);
  }
};

template <>
struct Decoder<K2Layout> {
  F32 d, minus_dmin;
  explicit Decoder(const uint8_t* tile)
      : d(f_load_f16_bytes(tile)), minus_dmin(f_sub(f_zero(), f_load_f16_bytes(tile + 32))) {}
  void scales(const uint8_t* tile, int b, F32 step[2], F32 minimum[2]) const {
    const I32 first = i_load_u8(tile + 64 + 32 * b), second = i_load_u8(tile + 80 + 32 * b);
    step[0] = f_mul(d, f_from_i(i_take_bits(first, 0, 15)));
    step[1] = f_mul(d, f_from_i(i_take_bits(second, 0, 15)));
    minimum[0] = f_mul(minus_dmin, f_from_i(i_take_bits(first, 4, 15)));
    minimum[1] = f_mul(minus_dmin, f_from_i(i_take_bits(second, 4, 15)));
  }
  static void codes(const uint8_t* block, U8 codes[8]) { pair_codes(block, codes); }
};

template <>
struct Decoder<K3Layout> {
  F32 d;
  explicit Decoder(const uint8_t* tile) : d(f_load_f16_bytes(tile)) {}
  void scales(const uint8_t* tile, int b, F32 step[2], F32*) const {
    const I32 low = i_load_u8(tile + 32 + 16 * b), high = i_load_u8(tile + 160 + 16 * (b / 2));
    const F32 sixteen = f_set1(16.0f), zero = f_set1(-32.0f);
    for (int s = 0; s < 2; ++s) {
      const F32 upper = f_from_i(i_take_bits(high, b % 2 * 4 + s * 2, 3));
      const F32 sc = f_fma(upper, sixteen, f_from_i(i_take_bits(low, 4 * s, 15)));
      step[s] = f_mul(d, f_add(sc, zero));
    }
  }
  static void codes(const uint8_t* block, U8 codes[8]) {
    pair_codes(block, codes);
    add_bit_plane<2>(block + 128, codes);
  }
};

template <>
struct Decoder<K4Layout> {
  F32 d, minus_dmin;
  explicit Decoder(const uint8_t* tile)
      : d(f_load_f16_bytes(tile)), minus_dmin(f_sub(f_zero(), f_load_f16_bytes(tile + 32))) {}
  void scales(const uint8_t* tile, int b, F32 step[1], F32 minimum[1]) const {
    step[0] = f_mul(d, f_load_u8(tile + 64 + 16 * b));
    minimum[0] = f_mul(minus_dmin, f_load_u8(tile + 192 + 16 * b));
  }
  static void codes(const uint8_t* block, U8 codes[8]) { nibble_codes(block, codes); }
};

template <>
struct Decoder<K4NlLayout> {
  F32 d;
  explicit Decoder(const uint8_t* tile) : d(f_load_f16_bytes(tile)) {}
  void scales(const uint8_t* tile, int b, F32 step[1], F32*) const {
    step[0] = f_mul(d, f_load_i8(reinterpret_cast<const int8_t*>(tile + 32 + 16 * b)));
  }
  static void codes(const uint8_t* block, U8 codes[8]) { lut_codes<K4NlLayout>(block, codes); }
};

template <>
struct Decoder<K5Layout> : Decoder<K4Layout> {
  using Decoder<K4Layout>::Decoder;
  static void codes(const uint8_t* block, U8 codes[8]) { Decoder<Int5Layout>::codes(block, codes); }
};

template <>
struct Decoder<K6Layout> {
  F32 d;
  explicit Decoder(const uint8_t* tile) : d(f_load_f16_bytes(tile)) {}
  void scales(const uint8_t* tile, int b, F32 step[2], F32*) const {
    const auto* sc = reinterpret_cast<const int8_t*>(tile + 32 + 32 * b);
    step[0] = f_mul(d, f_load_i8(sc));
    step[1] = f_mul(d, f_load_i8(sc + 16));
  }
  static void codes(const uint8_t* block, U8 codes[8]) {
    nibble_codes(block, codes);
    add_pair_plane<4>(block + 256, codes);
  }
};

#include "algo/decode_lattice.h"

// Two input channels of a float tile block: channels k and k + 1 (k even) of 16 outputs.
inline void load_pair(F32Layout, const uint8_t* block, int k, F32& even, F32& odd) {
  const auto* p = reinterpret_cast<const float*>(block);
  even = f_load(p + 16 * k);
  odd = f_load(p + 16 * k + 16);
}
inline void load_pair(F16Layout, const uint8_t* block, int k, F32& even, F32& odd) {
  const auto* p = reinterpret_cast<const uint16_t*>(block);
  even = f_load_f16(p + 16 * k);
  odd = f_load_f16(p + 16 * k + 16);
}
inline void load_pair(Bf16Layout, const uint8_t* block, int k, F32& even, F32& odd) {
  f_load_bf16_pairs(reinterpret_cast<const uint16_t*>(block) + 16 * k, even, odd);
}
// Divided by 2^8, which the scale makes up for.
inline void load_pair(Fp8Layout, const uint8_t* block, int k, F32& even, F32& odd) {
  even = f_load_e4m3_256th(block + 16 * k);
  odd = f_load_e4m3_256th(block + 16 * k + 16);
}
inline F32 load_scale(Fp8Layout, const uint8_t* tile) {
  return f_mul(f_load(reinterpret_cast<const float*>(tile)), f_set1(256.0f));
}

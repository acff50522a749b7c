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

inline F32 f_load_f16_bytes(const uint8_t* p) {
  return f_load_f16(reinterpret_cast<const uint16_t*>(p));
}

// Constructed per tile; scales(b) and codes(block) per block of 32 channels. `minimum` is left
// alone by formats without one.
template <class Layout>
struct Decoder;

template <>
struct Decoder<Int8Layout> {
  F32 scale;
  explicit Decoder(const uint8_t* tile) : scale(f_load_f16_bytes(tile)) {}
  void scales(const uint8_t*, int, F32 step[1], F32&) const { step[0] = scale; }
  static void codes(const uint8_t* block, U8 codes[8]) {
    for (int j = 0; j < 8; ++j) codes[j] = u8_load(block + 64 * j);
  }
};

template <>
struct Decoder<Int4Layout> {
  F32 scale;
  explicit Decoder(const uint8_t* tile) : scale(f_load_f16_bytes(tile)) {}
  void scales(const uint8_t*, int, F32 step[1], F32&) const { step[0] = scale; }
  static void codes(const uint8_t* block, U8 codes[8]) { nibble_codes(block, codes); }
};

template <>
struct Decoder<Int4ZeroLayout> {
  F32 scale, low;
  explicit Decoder(const uint8_t* tile)
      : scale(f_load_f16_bytes(tile)), low(f_mul(scale, f_sub(f_zero(), f_load_u8(tile + 32)))) {}
  void scales(const uint8_t*, int, F32 step[1], F32& minimum) const {
    step[0] = scale;
    minimum = low;
  }
  static void codes(const uint8_t* block, U8 codes[8]) { nibble_codes(block, codes); }
};

template <>
struct Decoder<Int4MinLayout> {
  F32 scale, low;
  explicit Decoder(const uint8_t* tile)
      : scale(f_load_f16_bytes(tile)), low(f_load_f16_bytes(tile + 32)) {}
  void scales(const uint8_t*, int, F32 step[1], F32& minimum) const {
    step[0] = scale;
    minimum = low;
  }
  static void codes(const uint8_t* block, U8 codes[8]) { nibble_codes(block, codes); }
};

template <>
struct Decoder<K4Layout> {
  F32 d, minus_dmin;
  explicit Decoder(const uint8_t* tile)
      : d(f_load_f16_bytes(tile)), minus_dmin(f_sub(f_zero(), f_load_f16_bytes(tile + 32))) {}
  void scales(const uint8_t* tile, int b, F32 step[1], F32& minimum) const {
    step[0] = f_mul(d, f_load_u8(tile + 64 + 16 * b));
    minimum = f_mul(minus_dmin, f_load_u8(tile + 192 + 16 * b));
  }
  static void codes(const uint8_t* block, U8 codes[8]) { nibble_codes(block, codes); }
};

template <>
struct Decoder<K6Layout> {
  F32 d;
  explicit Decoder(const uint8_t* tile) : d(f_load_f16_bytes(tile)) {}
  void scales(const uint8_t* tile, int b, F32 step[2], F32&) const {
    const auto* sc = reinterpret_cast<const int8_t*>(tile + 32 + 32 * b);
    step[0] = f_mul(d, f_load_i8(sc));
    step[1] = f_mul(d, f_load_i8(sc + 16));
  }
  static void codes(const uint8_t* block, U8 codes[8]) {
    nibble_codes(block, codes);
    const U8 first = u8_load(block + 256), second = u8_load(block + 320);
    codes[0] = u8_add_bits2<0>(codes[0], first);
    codes[1] = u8_add_bits2<2>(codes[1], first);
    codes[2] = u8_add_bits2<4>(codes[2], first);
    codes[3] = u8_add_bits2<6>(codes[3], first);
    codes[4] = u8_add_bits2<0>(codes[4], second);
    codes[5] = u8_add_bits2<2>(codes[5], second);
    codes[6] = u8_add_bits2<4>(codes[6], second);
    codes[7] = u8_add_bits2<6>(codes[7], second);
  }
};

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

// A float tile: what its header holds, and its channels as weights, rounded once.
template <class Layout>
struct FloatTile {
  explicit FloatTile(const uint8_t*) {}
  void pair(const uint8_t* block, int k, F32& even, F32& odd) const {
    load_pair(Layout{}, block, k, even, odd);
  }
};
template <>
struct FloatTile<Fp8Layout> {
  F32 scale;  // times the 2^8 that f_load_e4m3_256th leaves out: exact
  explicit FloatTile(const uint8_t* tile)
      : scale(f_mul(f_load(reinterpret_cast<const float*>(tile)), f_set1(256.0f))) {}
  void pair(const uint8_t* block, int k, F32& even, F32& odd) const {
    even = f_mul(f_load_e4m3_256th(block + 16 * k), scale);
    odd = f_mul(f_load_e4m3_256th(block + 16 * k + 16), scale);
  }
};

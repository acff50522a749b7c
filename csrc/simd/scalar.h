// Sixteen logical lanes as plain arrays: the reference of the other simd/ headers, and what any
// machine can run. Included inside the anonymous namespace of one isa/*.cpp; the three headers of
// this folder define the same names, and algo/ is written against those names alone.
#pragma once

constexpr int kLanes = 16;
constexpr int kBlockTokens = 2;        // tokens per register block of float and L1 kernels
constexpr int kDirectTokens = 2;       // of the integer kernels that decode into registers
constexpr int kTokenChains = 2;        // tokens whose sums advance side by side
constexpr int kDecodeFrom = 4;         // tokens from which a tile is decoded into L1 instead
constexpr int kFloatRows = 4;          // most rows of a float register block
constexpr int kFloatAccumulators = 4;  // F32 accumulators of it

struct F32 {
  float v[16];
};
struct I32 {
  int32_t v[16];
};
struct U8 {
  uint8_t v[64];
};

#define MOESTRO_LANES(expression) \
  for (int i = 0; i < 16; ++i) {  \
    expression;                   \
  }

inline F32 f_set1(float x) {
  F32 r;
  MOESTRO_LANES(r.v[i] = x)
  return r;
}
inline F32 f_zero() { return f_set1(0.0f); }
inline F32 f_load(const float* p) {
  F32 r;
  MOESTRO_LANES(r.v[i] = p[i])
  return r;
}
inline void f_store(float* p, F32 a) { MOESTRO_LANES(p[i] = a.v[i]) }
// The first n lanes from memory, zero in the rest.
inline F32 f_load_n(const float* p, int n) {
  F32 r;
  MOESTRO_LANES(r.v[i] = i < n ? p[i] : 0.0f)
  return r;
}
inline void f_store_n(float* p, int n, F32 a) {
  for (int i = 0; i < n; ++i) p[i] = a.v[i];
}
inline F32 f_add(F32 a, F32 b) {
  MOESTRO_LANES(a.v[i] = a.v[i] + b.v[i])
  return a;
}
inline F32 f_sub(F32 a, F32 b) {
  MOESTRO_LANES(a.v[i] = a.v[i] - b.v[i])
  return a;
}
inline F32 f_mul(F32 a, F32 b) {
  MOESTRO_LANES(a.v[i] = a.v[i] * b.v[i])
  return a;
}
inline F32 f_div(F32 a, F32 b) {
  MOESTRO_LANES(a.v[i] = a.v[i] / b.v[i])
  return a;
}
// a * b + c, rounded once.
inline F32 f_fma(F32 a, F32 b, F32 c) {
  MOESTRO_LANES(a.v[i] = std::fma(a.v[i], b.v[i], c.v[i]))
  return a;
}
// a > b ? a : b, so the second operand where either is NaN (as x86 does it).
inline F32 f_max(F32 a, F32 b) {
  MOESTRO_LANES(a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i])
  return a;
}
inline F32 f_min(F32 a, F32 b) {
  MOESTRO_LANES(a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i])
  return a;
}
inline F32 f_abs(F32 a) {
  MOESTRO_LANES(a.v[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(a.v[i]) & 0x7fffffffu))
  return a;
}
inline F32 f_sqrt(F32 a) {
  MOESTRO_LANES(a.v[i] = std::sqrt(a.v[i]))
  return a;
}
// a < b ? x : y in each lane (false where unordered).
inline F32 f_select_lt(F32 a, F32 b, F32 x, F32 y) {
  MOESTRO_LANES(x.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i])
  return x;
}
// Lanes n.. replaced by fill.
inline F32 f_keep_n(F32 a, int n, float fill) {
  MOESTRO_LANES(a.v[i] = i < n ? a.v[i] : fill)
  return a;
}
// One fixed tree on every ISA: 16 -> 8 -> 4 -> 2 -> 1, lane i with lane i + half.
inline float f_sum(F32 a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] + a.v[i + half];
  return a.v[0];
}
inline float f_max_lane(F32 a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  return a.v[0];
}
inline F32 f_load_f16(const uint16_t* p) {
  F32 r;
  MOESTRO_LANES(r.v[i] = f16_to_f32(p[i]))
  return r;
}
// 16 e4m3 bytes, divided by 2^8: as float16 of the same bits, moved up by seven.
inline F32 f_load_e4m3_256th(const uint8_t* p) {
  F32 r;
  MOESTRO_LANES(r.v[i] = f16_to_f32(static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7)))
  return r;
}
inline F32 f_load_bf16(const uint16_t* p) {
  F32 r;
  MOESTRO_LANES(r.v[i] = bf16_to_f32(p[i]))
  return r;
}
inline void f_store_f16(uint16_t* p, F32 a) { MOESTRO_LANES(p[i] = f32_to_f16(a.v[i])) }
inline void f_store_bf16(uint16_t* p, F32 a) { MOESTRO_LANES(p[i] = f32_to_bf16(a.v[i])) }
// 32 interleaved bf16: even elements and odd elements.
inline void f_load_bf16_pairs(const uint16_t* p, F32& even, F32& odd) {
  MOESTRO_LANES(even.v[i] = bf16_to_f32(p[2 * i]); odd.v[i] = bf16_to_f32(p[2 * i + 1]))
}

inline I32 i_set1(int32_t x) {
  I32 r;
  MOESTRO_LANES(r.v[i] = x)
  return r;
}
inline I32 i_add(I32 a, I32 b) {
  MOESTRO_LANES(a.v[i] = a.v[i] + b.v[i])
  return a;
}
inline I32 i_max(I32 a, I32 b) {
  MOESTRO_LANES(a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i])
  return a;
}
template <int kBits>
inline I32 i_shift_left(I32 a) {
  MOESTRO_LANES(a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << kBits))
  return a;
}
template <int kBits>
inline I32 i_shift_right(I32 a) {  // zeros come in
  MOESTRO_LANES(a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) >> kBits))
  return a;
}
inline I32 i_and(I32 a, I32 b) {
  MOESTRO_LANES(a.v[i] &= b.v[i])
  return a;
}
// The bits of each float.
inline I32 i_bits(F32 a) {
  I32 r;
  MOESTRO_LANES(r.v[i] = std::bit_cast<int32_t>(a.v[i]))
  return r;
}
inline int32_t i_sum(I32 a) {
  int32_t sum = 0;
  for (const int32_t x : a.v) sum += x;
  return sum;
}
inline int32_t i_max_lane(I32 a) { return *std::max_element(a.v, a.v + 16); }
inline I32 i_load(const int32_t* p) {
  I32 r;
  MOESTRO_LANES(r.v[i] = p[i])
  return r;
}
inline void i_store(int32_t* p, I32 a) { MOESTRO_LANES(p[i] = a.v[i]) }
// 16 signed or unsigned bytes widened.
inline F32 f_load_i8(const int8_t* p) {
  F32 r;
  MOESTRO_LANES(r.v[i] = static_cast<float>(p[i]))
  return r;
}
inline F32 f_load_u8(const uint8_t* p) {
  F32 r;
  MOESTRO_LANES(r.v[i] = static_cast<float>(p[i]))
  return r;
}
inline I32 i_load_u8(const uint8_t* p) {
  I32 r;
  MOESTRO_LANES(r.v[i] = p[i])
  return r;
}
// (a >> shift) & mask
inline I32 i_take_bits(I32 a, int shift, int32_t mask) {
  MOESTRO_LANES(a.v[i] = a.v[i] >> shift & mask)
  return a;
}
inline F32 f_from_i(I32 a) {
  F32 r;
  MOESTRO_LANES(r.v[i] = static_cast<float>(a.v[i]))
  return r;
}
// Round half to even; the caller keeps values inside int32.
inline I32 i_from_f(F32 a) {
  I32 r;
  MOESTRO_LANES(r.v[i] = static_cast<int32_t>(std::nearbyint(a.v[i])))
  return r;
}
// 2^n for n in -126..127.
inline F32 f_pow2i(I32 n) {
  F32 r;
  MOESTRO_LANES(r.v[i] = std::bit_cast<float>(static_cast<uint32_t>(n.v[i] + 127) << 23))
  return r;
}
// a * 2^n for whole n in -250..250, rounded once; NaN where a or n is.
inline F32 f_ldexp(F32 a, F32 n) {
  MOESTRO_LANES(a.v[i] = n.v[i] == n.v[i] ? std::ldexp(a.v[i], static_cast<int>(n.v[i])) : n.v[i])
  return a;
}
// Each lane saturated to a signed byte.
inline void i_store_i8(int8_t* p, I32 a) {
  MOESTRO_LANES(p[i] = static_cast<int8_t>(std::clamp(a.v[i], -128, 127)))
}

inline U8 u8_load(const uint8_t* p) {
  U8 r;
  std::memcpy(r.v, p, 64);
  return r;
}
inline void u8_store(uint8_t* p, U8 a) { std::memcpy(p, a.v, 64); }
inline U8 u8_low_nibbles(U8 a) {
  for (auto& x : a.v) x &= 15;
  return a;
}
inline U8 u8_high_nibbles(U8 a) {
  for (auto& x : a.v) x >>= 4;
  return a;
}
// low | (kCount bits of high from kFrom on) << kTo
template <int kCount, int kFrom, int kTo>
inline U8 u8_add_bits(U8 low, U8 high) {
  constexpr int kMask = (1 << kCount) - 1;
  for (int i = 0; i < 64; ++i) low.v[i] |= ((high.v[i] >> kFrom) & kMask) << kTo;
  return low;
}
// Two bits from kFrom on.
template <int kFrom>
inline U8 u8_take_bits2(U8 a) {
  for (auto& x : a.v) x = x >> kFrom & 3;
  return a;
}
// table[a], a below 16.
inline U8 u8_lookup(U8 a, const uint8_t* table) {
  for (auto& x : a.v) x = table[x];
  return a;
}
// Of each dword, the four pairs of bits of its byte kByte: in bits 0, 1 of bytes 0 and 2, in bits
// 2, 3 of bytes 1 and 3.
template <int kByte>
inline U8 u8_spread_pairs(const U8& a) {
  U8 r;
  for (int i = 0; i < 64; ++i) {
    const int pair = a.v[i / 4 * 4 + kByte] >> (2 * (i % 4)) & 3;
    r.v[i] = static_cast<uint8_t>(pair << (2 * (i % 2)));
  }
  return r;
}
// Of each dword, the nibbles 0, 2, 1, 3 of its 16-bit word kWord.
template <int kWord>
inline U8 u8_spread_nibbles(const U8& a) {
  U8 r;
  for (int i = 0; i < 64; ++i) r.v[i] = a.v[i / 4 * 4 + 2 * kWord + i % 2] >> (i % 4 / 2 * 4) & 15;
  return r;
}
// twice - a where bit kBit of plane is set, else a.
template <int kBit>
inline U8 u8_mirror(U8 a, const U8& plane, uint8_t twice) {
  for (int i = 0; i < 64; ++i)
    if (plane.v[i] >> kBit & 1) a.v[i] = static_cast<uint8_t>(twice - a.v[i]);
  return a;
}
inline U8 u8_xor(U8 a, const U8& b) {
  for (int i = 0; i < 64; ++i) a.v[i] ^= b.v[i];
  return a;
}
inline void prefetch(const void*) {}
// Into the second-level cache: for what is needed some microseconds later.
inline void prefetch_l2(const void*) {}
// The compiler must take the value as new: keeps measuring loops from being hoisted.
inline void opaque(F32& a) { __asm__ volatile("" : "+m"(a)); }
inline void opaque(U8& a) { __asm__ volatile("" : "+m"(a)); }
// value in the four bytes of each dword whose bit of lanes is set, else zero.
inline U8 u8_lanes(uint16_t lanes, uint8_t value) {
  U8 r;
  for (int i = 0; i < 64; ++i) r.v[i] = lanes >> (i / 4) & 1 ? value : 0;
  return r;
}
inline U8 u8_sub(U8 a, const U8& b) {
  for (int i = 0; i < 64; ++i) a.v[i] = static_cast<uint8_t>(a.v[i] - b.v[i]);
  return a;
}
#include "simd/words_loop.h"
#undef MOESTRO_LANES

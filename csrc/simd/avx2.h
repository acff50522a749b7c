// Sixteen lanes in two ymm (AVX2, FMA, F16C). See scalar.h for what each function means.
#pragma once

constexpr int kLanes = 16;
constexpr int kBlockTokens = 3;   // tokens per register block of float and L1 kernels
constexpr int kDirectTokens = 2;  // of the integer kernels that decode into registers
constexpr int kTokenChains = 2;   // tokens whose sums advance side by side
constexpr int kDecodeFrom = 4;    // tokens from which a tile is decoded into L1 instead
constexpr int kFloatRows = 6;
constexpr int kFloatAccumulators = 6;

struct F32 {
  __m256 a, b;
};
struct I32 {
  __m256i a, b;
};
struct U8 {
  __m256i a, b;
};

inline F32 f_set1(float x) {
  const __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
inline F32 f_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32 f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void f_store(float* p, F32 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
// All ones in lanes below n, for lanes first..first+7.
inline __m256i lane_mask(int n, int first) {
  const __m256i index =
      _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), index);
}
inline F32 f_load_n(const float* p, int n) {
  return {_mm256_maskload_ps(p, lane_mask(n, 0)), _mm256_maskload_ps(p + 8, lane_mask(n, 8))};
}
inline void f_store_n(float* p, int n, F32 x) {
  _mm256_maskstore_ps(p, lane_mask(n, 0), x.a);
  _mm256_maskstore_ps(p + 8, lane_mask(n, 8), x.b);
}
inline F32 f_add(F32 x, F32 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F32 f_sub(F32 x, F32 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F32 f_mul(F32 x, F32 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F32 f_div(F32 x, F32 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F32 f_fma(F32 x, F32 y, F32 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline F32 f_max(F32 x, F32 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F32 f_min(F32 x, F32 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F32 f_abs(F32 x) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
inline F32 f_sqrt(F32 x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
inline F32 f_select_lt(F32 p, F32 q, F32 x, F32 y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(p.a, q.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(p.b, q.b, _CMP_LT_OQ))};
}
inline F32 f_keep_n(F32 x, int n, float fill) {
  const __m256 f = _mm256_set1_ps(fill);
  return {_mm256_blendv_ps(f, x.a, _mm256_castsi256_ps(lane_mask(n, 0))),
          _mm256_blendv_ps(f, x.b, _mm256_castsi256_ps(lane_mask(n, 8)))};
}
inline float f_sum(F32 x) {
  const __m256 b = _mm256_add_ps(x.a, x.b);
  const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
inline float f_max_lane(F32 x) {
  const __m256 b = _mm256_max_ps(x.a, x.b);
  const __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_shuffle_ps(d, d, 1)));
}
inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline F32 f_load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 8))};
}
inline F32 f_load_e4m3_256th(const uint8_t* p) {
  const __m256i w = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load128(p)), 7);
  const __m256i h = _mm256_and_si256(w, _mm256_set1_epi16(short(0xbfff)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(h)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
}
inline __m256 widen_bf16(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline F32 f_load_bf16(const uint16_t* p) {
  return {widen_bf16(load128(p)), widen_bf16(load128(p + 8))};
}
inline void f_store_f16(uint16_t* p, F32 x) {
  constexpr int kRound = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, kRound));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, kRound));
}
inline void f_store_bf16(uint16_t* p, F32 x) {
  float lanes[16];
  f_store(lanes, x);
  for (int i = 0; i < 16; ++i) p[i] = f32_to_bf16(lanes[i]);
}
inline void f_load_bf16_pairs(const uint16_t* p, F32& even, F32& odd) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  const __m256i mask = _mm256_set1_epi32(int(0xffff0000u));
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(y, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(x, mask)),
         _mm256_castsi256_ps(_mm256_and_si256(y, mask))};
}

inline I32 i_set1(int32_t x) {
  const __m256i v = _mm256_set1_epi32(x);
  return {v, v};
}
inline I32 i_add(I32 x, I32 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I32 i_max(I32 x, I32 y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
template <int kBits>
inline I32 i_shift_left(I32 x) {
  return {_mm256_slli_epi32(x.a, kBits), _mm256_slli_epi32(x.b, kBits)};
}
template <int kBits>
inline I32 i_shift_right(I32 x) {
  return {_mm256_srli_epi32(x.a, kBits), _mm256_srli_epi32(x.b, kBits)};
}
inline I32 i_and(I32 x, I32 y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline I32 i_bits(F32 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline int32_t i_sum(I32 x) {
  const __m256i a = _mm256_add_epi32(x.a, x.b);
  const __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  const __m128i c = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(c, _mm_shuffle_epi32(c, 0xb1)));
}
inline int32_t i_max_lane(I32 x) {
  const __m256i a = _mm256_max_epi32(x.a, x.b);
  const __m128i b = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  const __m128i c = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(c, _mm_shuffle_epi32(c, 0xb1)));
}
inline I32 i_load(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline void i_store(int32_t* p, I32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
inline F32 f_load_i8(const int8_t* p) {
  const __m128i x = load128(p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
inline F32 f_load_u8(const uint8_t* p) {
  const __m128i x = load128(p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
inline I32 i_load_u8(const uint8_t* p) {
  const __m128i x = load128(p);
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
inline I32 i_take_bits(I32 x, int shift, int32_t mask) {
  const __m128i count = _mm_cvtsi32_si128(shift);
  const __m256i bits = _mm256_set1_epi32(mask);
  return {_mm256_and_si256(_mm256_srl_epi32(x.a, count), bits),
          _mm256_and_si256(_mm256_srl_epi32(x.b, count), bits)};
}
inline F32 f_from_i(I32 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I32 i_from_f(F32 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F32 f_pow2i(I32 n) {
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.a, bias), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.b, bias), 23))};
}
// In two exact halves unless the result is subnormal; then only the second rounds.
inline F32 f_ldexp(F32 x, F32 n) {
  const I32 whole = i_from_f(n);
  const I32 half = {_mm256_srai_epi32(whole.a, 1), _mm256_srai_epi32(whole.b, 1)};
  const I32 rest = {_mm256_sub_epi32(whole.a, half.a), _mm256_sub_epi32(whole.b, half.b)};
  return f_mul(f_mul(x, f_pow2i(half)), f_pow2i(rest));
}
inline __m128i narrow_to_i16(__m256i x) {
  return _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}
inline void i_store_i8(int8_t* p, I32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(narrow_to_i16(x.a), narrow_to_i16(x.b)));
}

inline U8 u8_load(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
inline void u8_store(uint8_t* p, U8 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), x.b);
}
inline U8 u8_low_nibbles(U8 x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline U8 u8_high_nibbles(U8 x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), mask),
          _mm256_and_si256(_mm256_srli_epi16(x.b, 4), mask)};
}
// Bytes shifted within 16-bit words; callers mask what crosses from the neighbour.
template <int kFrom, int kTo>
inline __m256i shift_bits(__m256i x) {
  if constexpr (kFrom <= kTo) {
    return _mm256_slli_epi16(x, kTo - kFrom);
  } else {
    return _mm256_srli_epi16(x, kFrom - kTo);
  }
}
template <int kCount, int kFrom, int kTo>
inline U8 u8_add_bits(U8 low, U8 high) {
  const __m256i mask = _mm256_set1_epi8(((1 << kCount) - 1) << kTo);
  return {_mm256_or_si256(low.a, _mm256_and_si256(shift_bits<kFrom, kTo>(high.a), mask)),
          _mm256_or_si256(low.b, _mm256_and_si256(shift_bits<kFrom, kTo>(high.b), mask))};
}
template <int kFrom>
inline U8 u8_take_bits2(U8 x) {
  const __m256i mask = _mm256_set1_epi8(3);
  return {_mm256_and_si256(shift_bits<kFrom, 0>(x.a), mask),
          _mm256_and_si256(shift_bits<kFrom, 0>(x.b), mask)};
}
inline U8 u8_lookup(U8 x, const uint8_t* table) {
  const __m256i values = _mm256_broadcastsi128_si256(load128(table));
  return {_mm256_shuffle_epi8(values, x.a), _mm256_shuffle_epi8(values, x.b)};
}
// The upper word of each dword shifted by four, then masked.
inline __m256i shift_upper_words(__m256i x, int mask) {
  return _mm256_and_si256(_mm256_blend_epi16(x, _mm256_srli_epi16(x, 4), 0xaa),
                          _mm256_set1_epi32(mask));
}
template <int kByte>
inline U8 u8_spread_pairs(U8 x) {
  const __m256i lanes = _mm256_broadcastsi128_si256(
      _mm_add_epi8(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c), _mm_set1_epi8(kByte)));
  return {shift_upper_words(_mm256_shuffle_epi8(x.a, lanes), 0x0c030c03),
          shift_upper_words(_mm256_shuffle_epi8(x.b, lanes), 0x0c030c03)};
}
template <int kWord>
inline U8 u8_spread_nibbles(U8 x) {
  const __m256i lanes = _mm256_broadcastsi128_si256(_mm_add_epi8(
      _mm_setr_epi32(0x01000100, 0x05040504, 0x09080908, 0x0d0c0d0c), _mm_set1_epi8(2 * kWord)));
  return {shift_upper_words(_mm256_shuffle_epi8(x.a, lanes), 0x0f0f0f0f),
          shift_upper_words(_mm256_shuffle_epi8(x.b, lanes), 0x0f0f0f0f)};
}
inline __m256i mirror_where(__m256i x, __m256i plane, __m256i bit, __m256i twice) {
  const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(plane, bit), bit);
  return _mm256_blendv_epi8(x, _mm256_sub_epi8(twice, x), set);
}
template <int kBit>
inline U8 u8_mirror(U8 x, U8 plane, uint8_t twice) {
  const __m256i bit = _mm256_set1_epi8(static_cast<char>(1 << kBit));
  const __m256i sum = _mm256_set1_epi8(static_cast<char>(twice));
  return {mirror_where(x.a, plane.a, bit, sum), mirror_where(x.b, plane.b, bit, sum)};
}
inline U8 u8_lanes(uint16_t lanes, uint8_t value) {
  const __m256i bytes = _mm256_set1_epi8(static_cast<char>(value)), all = _mm256_set1_epi32(lanes);
  const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i high = _mm256_slli_epi32(low, 8);
  return {_mm256_and_si256(_mm256_cmpeq_epi32(_mm256_and_si256(all, low), low), bytes),
          _mm256_and_si256(_mm256_cmpeq_epi32(_mm256_and_si256(all, high), high), bytes)};
}
inline U8 u8_sub(U8 x, U8 y) { return {_mm256_sub_epi8(x.a, y.a), _mm256_sub_epi8(x.b, y.b)}; }
#include "simd/words_loop.h"
inline U8 u8_xor(U8 x, U8 y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
inline void opaque(F32& x) { __asm__ volatile("" : "+x"(x.a), "+x"(x.b)); }
inline void opaque(U8& x) { __asm__ volatile("" : "+x"(x.a), "+x"(x.b)); }
// (Inlined by force: GCC 12 takes a function that only prefetches for one without effect, and drops
// the call.)
[[gnu::always_inline]] inline void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
[[gnu::always_inline]] inline void prefetch_l2(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

// Sixteen lanes in one zmm (AVX-512 F, BW, VL, DQ). See scalar.h for what each function means.
#pragma once

constexpr int kLanes = 16;
constexpr int kBlockTokens = 6;   // tokens per register block of the float kernels
constexpr int kDirectTokens = 8;  // of the integer kernels that decode into registers
constexpr int kTokenChains = 4;   // tokens whose sums advance side by side
constexpr int kDecodeFrom = 0;    // never through L1: 32 registers hold codes and sums
constexpr int kFloatRows = 12;
constexpr int kFloatAccumulators = 24;

using F32 = __m512;
using I32 = __m512i;
struct U8 {
  __m512i v;
};

inline F32 f_set1(float x) { return _mm512_set1_ps(x); }
inline F32 f_zero() { return _mm512_setzero_ps(); }
inline F32 f_load(const float* p) { return _mm512_loadu_ps(p); }
inline void f_store(float* p, F32 a) { _mm512_storeu_ps(p, a); }
inline __mmask16 first_lanes(int n) {
  return n >= 16 ? __mmask16(0xffff) : n <= 0 ? __mmask16(0) : __mmask16((1u << n) - 1);
}
inline F32 f_load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void f_store_n(float* p, int n, F32 a) { _mm512_mask_storeu_ps(p, first_lanes(n), a); }
inline F32 f_add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
inline F32 f_sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
inline F32 f_mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
inline F32 f_div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
inline F32 f_fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
inline F32 f_max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
inline F32 f_min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
inline F32 f_abs(F32 a) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)));
}
inline F32 f_sqrt(F32 a) { return _mm512_sqrt_ps(a); }
inline F32 f_select_lt(F32 a, F32 b, F32 x, F32 y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
inline F32 f_keep_n(F32 a, int n, float fill) {
  return _mm512_mask_blend_ps(first_lanes(n), _mm512_set1_ps(fill), a);
}
inline float f_sum(F32 a) {
  const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
inline float f_max_lane(F32 a) {
  const __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_shuffle_ps(d, d, 1)));
}
inline F32 f_load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline F32 f_load_e4m3_256th(const uint8_t* p) {
  const __m256i w = _mm256_slli_epi16(
      _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 7);
  return _mm512_cvtph_ps(_mm256_and_si256(w, _mm256_set1_epi16(short(0xbfff))));
}
inline F32 f_load_bf16(const uint16_t* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
inline void f_store_f16(uint16_t* p, F32 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void f_store_bf16(uint16_t* p, F32 a) {
  const __m512i u = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
  const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet)));
}
inline void f_load_bf16_pairs(const uint16_t* p, F32& even, F32& odd) {
  const __m512i w = _mm512_loadu_si512(p);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000u))));
}

inline I32 i_set1(int32_t x) { return _mm512_set1_epi32(x); }
inline I32 i_add(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
inline I32 i_max(I32 a, I32 b) { return _mm512_max_epi32(a, b); }
template <int kBits>
inline I32 i_shift_left(I32 a) {
  return _mm512_slli_epi32(a, kBits);
}
template <int kBits>
inline I32 i_shift_right(I32 a) {
  return _mm512_srli_epi32(a, kBits);
}
inline I32 i_and(I32 a, I32 b) { return _mm512_and_si512(a, b); }
inline I32 i_bits(F32 a) { return _mm512_castps_si512(a); }
inline int32_t i_sum(I32 a) { return _mm512_reduce_add_epi32(a); }
inline int32_t i_max_lane(I32 a) { return _mm512_reduce_max_epi32(a); }
inline I32 i_load(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void i_store(int32_t* p, I32 a) { _mm512_storeu_si512(p, a); }
inline F32 f_load_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline F32 f_load_u8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline I32 i_load_u8(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline I32 i_take_bits(I32 a, int shift, int32_t mask) {
  return _mm512_and_si512(_mm512_srl_epi32(a, _mm_cvtsi32_si128(shift)), _mm512_set1_epi32(mask));
}
inline F32 f_from_i(I32 a) { return _mm512_cvtepi32_ps(a); }
inline I32 i_from_f(F32 a) { return _mm512_cvtps_epi32(a); }
inline F32 f_pow2i(I32 n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
inline F32 f_ldexp(F32 a, F32 n) { return _mm512_scalef_ps(a, n); }
inline void i_store_i8(int8_t* p, I32 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a));
}

inline U8 u8_load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void u8_store(uint8_t* p, U8 a) { _mm512_storeu_si512(p, a.v); }
inline U8 u8_low_nibbles(U8 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline U8 u8_high_nibbles(U8 a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
// Bytes shifted within 16-bit words; callers mask what crosses from the neighbour.
template <int kFrom, int kTo>
inline __m512i shift_bits(__m512i x) {
  if constexpr (kFrom <= kTo) {
    return _mm512_slli_epi16(x, kTo - kFrom);
  } else {
    return _mm512_srli_epi16(x, kFrom - kTo);
  }
}
template <int kCount, int kFrom, int kTo>
inline U8 u8_add_bits(U8 low, U8 high) {
  const __m512i mask = _mm512_set1_epi8(((1 << kCount) - 1) << kTo);
  // low | (bits & mask)
  return {_mm512_ternarylogic_epi64(low.v, shift_bits<kFrom, kTo>(high.v), mask, 0xf8)};
}
template <int kFrom>
inline U8 u8_take_bits2(U8 a) {
  return {_mm512_and_si512(shift_bits<kFrom, 0>(a.v), _mm512_set1_epi8(3))};
}
inline U8 u8_lookup(U8 a, const uint8_t* table) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), a.v)};
}
// The upper word of each dword shifted by four, then masked.
inline U8 shift_upper_words(__m512i x, int mask) {
  return {_mm512_and_si512(_mm512_srlv_epi16(x, _mm512_set1_epi32(0x00040000)),
                           _mm512_set1_epi32(mask))};
}
template <int kByte>
inline U8 u8_spread_pairs(U8 a) {
  constexpr int k = 0x01010101 * kByte;
  const __m512i lanes =
      _mm512_set4_epi32(0x0c0c0c0c + k, 0x08080808 + k, 0x04040404 + k, 0x00000000 + k);
  return shift_upper_words(_mm512_shuffle_epi8(a.v, lanes), 0x0c030c03);
}
template <int kWord>
inline U8 u8_spread_nibbles(U8 a) {
  constexpr int k = 0x02020202 * kWord;
  const __m512i lanes =
      _mm512_set4_epi32(0x0d0c0d0c + k, 0x09080908 + k, 0x05040504 + k, 0x01000100 + k);
  return shift_upper_words(_mm512_shuffle_epi8(a.v, lanes), 0x0f0f0f0f);
}
template <int kBit>
inline U8 u8_mirror(U8 a, U8 plane, uint8_t twice) {
  const __mmask64 set =
      _mm512_test_epi8_mask(plane.v, _mm512_set1_epi8(static_cast<char>(1 << kBit)));
  return {_mm512_mask_sub_epi8(a.v, set, _mm512_set1_epi8(static_cast<char>(twice)), a.v)};
}

// Words of a table at 32 indices each in a and b. Bits 0..5 choose within two registers, the masks
// of bits 6 and up among those.
struct WordPair {
  __m512i a, b;
};
struct BitMasks {
  __mmask32 a, b;
};
template <int kBits>
inline WordPair pick_words(const uint16_t* table, const WordPair& index, const BitMasks* masks) {
  if constexpr (kBits == 6) {
    const __m512i low = _mm512_load_si512(table), high = _mm512_load_si512(table + 32);
    return {_mm512_permutex2var_epi16(low, index.a, high),
            _mm512_permutex2var_epi16(low, index.b, high)};
  } else {
    const WordPair zero = pick_words<kBits - 1>(table, index, masks);
    const WordPair one = pick_words<kBits - 1>(table + (1 << (kBits - 1)), index, masks);
    const BitMasks bit = masks[kBits - 7];
    return {_mm512_mask_blend_epi16(bit.a, zero.a, one.a),
            _mm512_mask_blend_epi16(bit.b, zero.b, one.b)};
  }
}
template <int kHigh>
inline void u8_lookup_words(const uint16_t* table, const uint8_t* low, const uint8_t* high,
                            U8& even, U8& odd) {
  const __m512i bytes = _mm512_loadu_si512(low);
  const __m512i sixth = _mm512_set1_epi16(64), seventh = _mm512_set1_epi16(128);
  const WordPair index{bytes, _mm512_srli_epi16(bytes, 8)};
  BitMasks masks[2 + kHigh] = {
      {_mm512_test_epi16_mask(index.a, sixth), _mm512_test_epi16_mask(index.b, sixth)},
      {_mm512_test_epi16_mask(index.a, seventh), _mm512_test_epi16_mask(index.b, seventh)}};
  for (int p = 0; p < kHigh; ++p) {
    uint32_t both[2];
    std::memcpy(both, high + 8 * p, 8);
    masks[2 + p] = {both[0], both[1]};
  }
  const WordPair words = pick_words<8 + kHigh>(table, index, masks);
  even.v = words.a;
  odd.v = words.b;
}
inline U8 u8_lanes(uint16_t lanes, uint8_t value) {
  return {_mm512_maskz_set1_epi32(lanes, 0x01010101 * value)};
}
inline U8 u8_sub(U8 a, U8 b) { return {_mm512_sub_epi8(a.v, b.v)}; }
inline U8 u8_xor(U8 a, U8 b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline void opaque(F32& a) { __asm__ volatile("" : "+v"(a)); }
inline void opaque(U8& a) { __asm__ volatile("" : "+v"(a.v)); }
// (Inlined by force: GCC 12 takes a function that only prefetches for one without effect, and drops
// the call.)
[[gnu::always_inline]] inline void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
[[gnu::always_inline]] inline void prefetch_l2(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

// maddubs on 512 bits. Its 16-bit pair sums saturate, so their size is bounded by kBits:
//   4 bits: 2 * 15 * 128 = 3840, eight of them fit in 16 bits: one widening add per 32 channels
//   6 bits: 2 * 63 * 128 = 16128, widened after each
//   8 bits: 2 * 255 * 128 would saturate: the code is split into nibbles and each half is a 4-bit
//   case
#pragma once

constexpr int kAccChannels = 32;

using Quad = __m512i;
inline Quad quad_load(const int8_t* p) {
  int32_t dword;
  std::memcpy(&dword, p, 4);
  return _mm512_set1_epi32(dword);
}
inline __m512i widen_pairs(__m512i x) { return _mm512_madd_epi16(x, _mm512_set1_epi16(1)); }

template <int kBits>
struct Acc;

template <>
struct Acc<4> {
  __m512i pairs;
  static Acc start(int32_t) { return {_mm512_setzero_si512()}; }
  void dot(const U8& codes, Quad x) {
    pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16(codes.v, x));
  }
  I32 result(int32_t init) const {
    return _mm512_add_epi32(widen_pairs(pairs), _mm512_set1_epi32(init));
  }
};

template <>
struct Acc<6> {
  I32 sum;
  static Acc start(int32_t init) { return {_mm512_set1_epi32(init)}; }
  void dot(const U8& codes, Quad x) {
    sum = _mm512_add_epi32(sum, widen_pairs(_mm512_maddubs_epi16(codes.v, x)));
  }
  I32 result(int32_t) const { return sum; }
};

template <>
struct Acc<8> {
  __m512i low, high;
  static Acc start(int32_t) { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
  void dot(const U8& codes, Quad x) {
    low = _mm512_add_epi16(low, _mm512_maddubs_epi16(u8_low_nibbles(codes).v, x));
    high = _mm512_add_epi16(high, _mm512_maddubs_epi16(u8_high_nibbles(codes).v, x));
  }
  I32 result(int32_t init) const {
    const __m512i upper = _mm512_slli_epi32(widen_pairs(high), 4);
    return _mm512_add_epi32(_mm512_add_epi32(widen_pairs(low), upper), _mm512_set1_epi32(init));
  }
};

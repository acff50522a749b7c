// maddubs on 256 bits, two registers per 16 channels. See dot_avx512.h for the bounds.
#pragma once

constexpr int kAccChannels = 32;

using Quad = __m256i;
inline Quad quad_load(const int8_t* p) {
  int32_t dword;
  std::memcpy(&dword, p, 4);
  return _mm256_set1_epi32(dword);
}
inline __m256i widen_pairs(__m256i x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }

template <int kBits>
struct Acc;

template <>
struct Acc<4> {
  __m256i a, b;
  static Acc start(int32_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  void dot(const U8& codes, Quad x) {
    a = _mm256_add_epi16(a, _mm256_maddubs_epi16(codes.a, x));
    b = _mm256_add_epi16(b, _mm256_maddubs_epi16(codes.b, x));
  }
  I32 result(int32_t init) const {
    const __m256i start = _mm256_set1_epi32(init);
    return {_mm256_add_epi32(widen_pairs(a), start), _mm256_add_epi32(widen_pairs(b), start)};
  }
};

template <>
struct Acc<6> {
  I32 sum;
  static Acc start(int32_t init) { return {i_set1(init)}; }
  void dot(const U8& codes, Quad x) {
    sum.a = _mm256_add_epi32(sum.a, widen_pairs(_mm256_maddubs_epi16(codes.a, x)));
    sum.b = _mm256_add_epi32(sum.b, widen_pairs(_mm256_maddubs_epi16(codes.b, x)));
  }
  I32 result(int32_t) const { return sum; }
};

template <>
struct Acc<8> {
  Acc<4> low, high;
  static Acc start(int32_t) { return {Acc<4>::start(0), Acc<4>::start(0)}; }
  void dot(const U8& codes, Quad x) {
    low.dot(u8_low_nibbles(codes), x);
    high.dot(u8_high_nibbles(codes), x);
  }
  I32 result(int32_t init) const {
    const I32 lower = low.result(init), upper = high.result(0);
    return {_mm256_add_epi32(lower.a, _mm256_slli_epi32(upper.a, 4)),
            _mm256_add_epi32(lower.b, _mm256_slli_epi32(upper.b, 4))};
  }
};

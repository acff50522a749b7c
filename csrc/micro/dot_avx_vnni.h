// vpdpbusd in its VEX encoding, on 256 bits, two registers per 16 channels: unsigned times signed,
// four products into 32 bits, no intermediate saturation.
#pragma once

using Quad = __m256i;
inline Quad quad_load(const int8_t* p) {
  int32_t dword;
  std::memcpy(&dword, p, 4);
  return _mm256_set1_epi32(dword);
}

template <int kBits>
struct Acc {
  I32 sum;
  static Acc start(int32_t init) { return {i_set1(init)}; }
  void dot(const U8& codes, Quad x) {
    sum.a = _mm256_dpbusd_avx_epi32(sum.a, codes.a, x);
    sum.b = _mm256_dpbusd_avx_epi32(sum.b, codes.b, x);
  }
  I32 result(int32_t) const { return sum; }
};

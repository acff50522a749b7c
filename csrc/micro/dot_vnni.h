// vpdpbusd: unsigned times signed, four products into 32 bits, no intermediate saturation.
#pragma once

constexpr int kAccChannels = 1024;

using Quad = __m512i;
inline Quad quad_load(const int8_t* p) {
  int32_t dword;
  std::memcpy(&dword, p, 4);
  return _mm512_set1_epi32(dword);
}

template <int kBits>
struct Acc {
  I32 sum;
  static Acc start(int32_t init) { return {_mm512_set1_epi32(init)}; }
  void dot(const U8& codes, Quad x) { sum = _mm512_dpbusd_epi32(sum, codes.v, x); }
  I32 result(int32_t) const { return sum; }
};

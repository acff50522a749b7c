// vdpbf16ps: two bfloat16 products per lane, added to a float32.
//
// Per lane it is two fused multiply-adds, the odd elements' first, each rounded once to nearest
// even. Denormal inputs count as zero and denormal results become zero, whatever MXCSR says.
#pragma once

// A pair of input channels of one token, in every lane.
using Pair = __m512i;
inline F32 pair_dot(F32 acc, Pair weights, Pair x) {
  return _mm512_dpbf16_ps(acc, __m512bh(weights), __m512bh(x));
}
inline void opaque(Pair& a) { __asm__ volatile("" : "+v"(a)); }

int64_t pair_peak(int64_t rounds) {
  constexpr int kPairChains = 12;
  Pair w = _mm512_set1_epi32(0x3f803f80);
  const Pair x = _mm512_set1_epi32(0x3e803e80);
  F32 acc[kPairChains];
  for (auto& a : acc) a = f_zero();
  for (int64_t r = 0; r < rounds; ++r)
    for (auto& a : acc) {
      opaque(w);
      a = pair_dot(a, w, x);
    }
  for (auto& a : acc) opaque(a);
  return rounds * kPairChains * 32;
}

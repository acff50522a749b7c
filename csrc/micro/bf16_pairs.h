// vdpbf16ps: two bfloat16 products per lane, added to a float32; and e4m3 bytes as bfloat16.
//
// Per lane it is two fused multiply-adds, the odd elements' first, each rounded once to nearest
// even. Denormal inputs count as zero and denormal results become zero, whatever MXCSR says.
#pragma once

// A pair of input channels: of sixteen output channels, or of one token in every lane.
using Pair = __m512i;
inline Pair pair_load(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void pair_store(uint8_t* p, Pair a) { _mm512_storeu_si512(p, a); }
inline Pair pair_set1(const uint16_t* p) {
  int32_t dword;
  std::memcpy(&dword, p, 4);
  return _mm512_set1_epi32(dword);
}
inline F32 pair_dot(F32 acc, Pair weights, Pair x) {
  return _mm512_dpbf16_ps(acc, __m512bh(weights), __m512bh(x));
}
inline void opaque(Pair& a) { __asm__ volatile("" : "+v"(a)); }

// 32 floats, a then b, to nearest even; denormal ones become zero.
inline void store_bf16(uint16_t* p, F32 a, F32 b) {
  _mm512_storeu_si512(p, __m512i(_mm512_cvtne2ps_pbh(b, a)));
}

// Two channels of sixteen outputs as pairs, to nearest even; denormal ones become zero.
inline void store_pairs(uint8_t* p, F32 even, F32 odd) {
  const __m512i low = _mm512_cvtepu16_epi32(__m256i(_mm512_cvtneps_pbh(even)));
  const __m512i high = _mm512_cvtepu16_epi32(__m256i(_mm512_cvtneps_pbh(odd)));
  _mm512_storeu_si512(p, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

// Every e4m3 magnitude is a bfloat16. Its two bytes by the seven bits of the code; the order in
// which vpermi2b joins a register of lower bytes with one of upper bytes to pairs of channels.
struct E4m3Tables {
  uint8_t low[128], high[128], pairs[64];
};
constexpr E4m3Tables make_e4m3_tables() {
  E4m3Tables t{};
  for (int code = 0; code < 128; ++code) {
    const int exponent = code >> 3, mantissa = code & 7;
    float value = exponent == 0 ? 0x1p-9f * float(mantissa) : 0x1p-10f * float(8 + mantissa);
    for (int e = 1; e < exponent; ++e) value *= 2.0f;
    if (exponent > 0) value *= 2.0f;
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    t.low[code] = static_cast<uint8_t>(bits >> 16);
    t.high[code] = static_cast<uint8_t>(bits >> 24);
  }
  for (int c = 0; c < 16; ++c)
    for (int k = 0; k < 2; ++k) {
      t.pairs[4 * c + 2 * k] = static_cast<uint8_t>(16 * k + c);
      t.pairs[4 * c + 2 * k + 1] = static_cast<uint8_t>(64 + 16 * k + c);
    }
  return t;
}
alignas(64) constexpr E4m3Tables kE4m3 = make_e4m3_tables();

// vpermi2b by name: with vpermt2b, which GCC takes as readily, products of pairs beside it were 3 %
// slower on Zen 4.
inline __m512i lookup_bytes(__m512i index, __m512i lower, __m512i upper) {
  __asm__("vpermi2b %2, %1, %0" : "+v"(index) : "v"(lower), "v"(upper));
  return index;
}

// 64 bytes, element (k, c) at k * 16 + c, as the pairs of k = 0, 1 and of k = 2, 3.
inline void e4m3_pairs(const uint8_t* p, Pair& first, Pair& second) {
  __m512i codes = _mm512_loadu_si512(p);
  opaque(codes);  // loaded once and in order: what the hardware prefetcher sees
  const __m512i low =
      lookup_bytes(codes, _mm512_load_si512(kE4m3.low), _mm512_load_si512(kE4m3.low + 64));
  const __m512i magnitude =
      lookup_bytes(codes, _mm512_load_si512(kE4m3.high), _mm512_load_si512(kE4m3.high + 64));
  // magnitude | (codes & sign)
  const __m512i high =
      _mm512_ternarylogic_epi64(magnitude, codes, _mm512_set1_epi8(char(0x80)), 0xf8);
  const __m512i order = _mm512_load_si512(kE4m3.pairs);
  first = lookup_bytes(order, low, high);
  second = lookup_bytes(_mm512_add_epi8(order, _mm512_set1_epi8(32)), low, high);
}

inline int64_t pair_peak(int64_t rounds) {
  constexpr int kPairChains = 12;
  Pair w = _mm512_set1_epi32(0x3f803f80);
  const Pair x = _mm512_set1_epi32(0x3e803e80);
  F32 acc[kPairChains];
  for (auto& a : acc) a = f_zero();
  for (int64_t r = 0; r < rounds; ++r)
#pragma GCC unroll 12
    for (auto& a : acc) {
      opaque(w);
      a = pair_dot(a, w, x);
    }
  for (auto& a : acc) opaque(a);
  return rounds * kPairChains * 32;
}

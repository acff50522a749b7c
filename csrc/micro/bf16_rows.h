// Pairs of bfloat16 numbers out of rows of sixteen, for micro/bf16_pairs.h.
#pragma once

// Lane i of the result holds element i of both halves.
inline Pair pair_interleave(__m512i halves) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), halves);
}
// Two rows of sixteen, one behind the other.
inline Pair pair_rows(const std::byte* p) { return pair_interleave(_mm512_loadu_si512(p)); }
inline __m256i row16(const std::byte* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline Pair pair_rows(const std::byte* even, const std::byte* odd) {
  return pair_interleave(_mm512_inserti64x4(_mm512_castsi256_si512(row16(even)), row16(odd), 1));
}
// One row beside zeros.
inline Pair pair_even_row(const std::byte* p) { return _mm512_cvtepu16_epi32(row16(p)); }
inline Pair pair_odd_row(const std::byte* p) {
  return _mm512_slli_epi32(_mm512_cvtepu16_epi32(row16(p)), 16);
}
// Rounds to nearest even, denormals to zero; returns what was stored.
inline F32 round_to_bf16(uint16_t* p, F32 x) {
  const __m256i half = __m256i(_mm512_cvtneps_pbh(x));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

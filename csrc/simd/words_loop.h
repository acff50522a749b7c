// Word lookups where no permutation of registers does them. Included by simd/ headers, inside their
// anonymous namespace.
#pragma once

// Of n = 0..63, the word table[low[n] | high bits << 8] goes to dword n / 4: the lower word of even
// for n % 4 = 0, of odd for 1, the upper word of even for 2, of odd for 3. high: kHigh planes of 8
// bytes, bit n % 2 * 32 + n / 4 * 2 + n % 4 / 2 of each for n. A table is aligned to 64 bytes.
template <int kHigh>
inline void u8_lookup_words(const uint16_t* table, const uint8_t* low, const uint8_t* high,
                            U8& even, U8& odd) {
  alignas(64) uint16_t words[64];
  uint64_t planes[kHigh + 1];
  if constexpr (kHigh > 0) std::memcpy(planes, high, 8 * kHigh);
  for (int to = 0; to < 64; ++to) {
    int index = low[to % 32 / 2 * 4 + to % 2 * 2 + to / 32];
    for (int p = 0; p < kHigh; ++p) index |= static_cast<int>(planes[p] >> to & 1) << (8 + p);
    words[to] = table[index];
  }
  even = u8_load(reinterpret_cast<const uint8_t*>(words));
  odd = u8_load(reinterpret_cast<const uint8_t*>(words + 32));
}

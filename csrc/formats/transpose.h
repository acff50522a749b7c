// Bytes of four channels side by side: how the shuffles of pack_exact.cpp fill a tile's lanes.
#pragma once

#include <cstdint>
#include <cstring>

namespace moestro {

// Four 32-bit words, in whatever registers the baseline machine has.
using Quad = uint32_t __attribute__((vector_size(16)));

inline Quad quad(const uint8_t* p) {
  Quad q;
  std::memcpy(&q, p, sizeof q);
  return q;
}

inline void put_quad(uint8_t* p, Quad q) { std::memcpy(p, &q, sizeof q); }

// {a[0], b[0], a[1], b[1]} and {a[2], b[2], a[3], b[3]}.
#if defined(__clang__)
inline Quad zip_low(Quad a, Quad b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
inline Quad zip_high(Quad a, Quad b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
#else
inline Quad zip_low(Quad a, Quad b) { return __builtin_shuffle(a, b, Quad{0, 4, 1, 5}); }
inline Quad zip_high(Quad a, Quad b) { return __builtin_shuffle(a, b, Quad{2, 6, 3, 7}); }
#endif

// Rows of a 4 x 4 matrix of words become its columns.
inline void transpose(Quad q[4]) {
  const Quad a = zip_low(q[0], q[2]), b = zip_high(q[0], q[2]);
  const Quad c = zip_low(q[1], q[3]), d = zip_high(q[1], q[3]);
  q[0] = zip_low(a, c);
  q[1] = zip_high(a, c);
  q[2] = zip_low(b, d);
  q[3] = zip_high(b, d);
}

// Four words of each of four channels into four runs of channels, 64 bytes apart.
inline void put_words(uint8_t* to, Quad q[4]) {
  transpose(q);
  for (int j = 0; j < 4; ++j) put_quad(to + j * 64, q[j]);
}

// Four bytes of each of four channels into four runs of channels, 16 bytes apart.
inline void put_bytes(uint8_t* to, const uint32_t w[4]) {
  constexpr uint32_t kEven = 0x00ff00ffu;
  const uint32_t a = (w[0] & kEven) | (w[1] & kEven) << 8, b = (w[2] & kEven) | (w[3] & kEven) << 8;
  const uint32_t c = (w[0] >> 8 & kEven) | (w[1] & ~kEven),
                 d = (w[2] >> 8 & kEven) | (w[3] & ~kEven);
  const uint32_t runs[4] = {(a & 0xffffu) | b << 16, (c & 0xffffu) | d << 16,
                            a >> 16 | (b & 0xffff0000u), c >> 16 | (d & 0xffff0000u)};
  for (int j = 0; j < 4; ++j) std::memcpy(to + j * 16, &runs[j], 4);
}

}  // namespace moestro

// Dot of unsigned weight codes and signed activation bytes, four input channels at a time, in plain
// C++: the reference of the other micro/dot_*.h. All of them are exact for every pair of codes.
//
// Acc<kBits> accumulates up to kAccChannels channels of codes below 2^kBits. start(init) .. dot()
// .. result(init) yields init + sum; a variant may use init at either end.
#pragma once

constexpr int kAccChannels = 32;

struct Quad {
  int8_t v[4];
};
inline Quad quad_load(const int8_t* p) {
  Quad q;
  std::memcpy(q.v, p, 4);
  return q;
}

template <int kBits>
struct Acc {
  I32 sum;
  static Acc start(int32_t init) { return {i_set1(init)}; }
  void dot(const U8& codes, Quad x) {
    for (int c = 0; c < 16; ++c)
      for (int i = 0; i < 4; ++i) sum.v[c] += int32_t{codes.v[4 * c + i]} * x.v[i];
  }
  I32 result(int32_t) const { return sum; }
};

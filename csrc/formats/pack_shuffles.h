// What the shuffles of pack_exact.cpp and pack_lattice.cpp share: each fills one tile from the 16
// source blocks of its lanes.
#pragma once

#include <cstdint>
#include <cstring>

#include "formats/format.h"

namespace moestro {

// Source blocks of one tile, by channel.
using Lanes = const uint8_t* const (&)[kTileChannels];

// NaNs and infinities found, by kind of value (see Shuffle::values).
struct NonFinite {
  int64_t count[2] = {0, 0};
};

inline uint32_t word(const uint8_t* p) {
  uint32_t w;
  std::memcpy(&w, p, 4);
  return w;
}

inline void put(uint8_t* p, uint32_t w) { std::memcpy(p, &w, 4); }

// Copies a float16 into the tile's header and counts it if it is not finite.
inline void put_half(uint8_t* header, int c, const uint8_t* from, int64_t& bad) {
  uint16_t h;
  std::memcpy(&h, from, 2);
  bad += (h & 0x7c00) == 0x7c00;
  std::memcpy(header + 2 * c, &h, 2);
}

void iq2_xxs_tile(Lanes lanes, uint8_t* tile, NonFinite& bad);
void iq2_xs_tile(Lanes lanes, uint8_t* tile, NonFinite& bad);
void iq2_s_tile(Lanes lanes, uint8_t* tile, NonFinite& bad);
void iq3_xxs_tile(Lanes lanes, uint8_t* tile, NonFinite& bad);
void iq3_s_tile(Lanes lanes, uint8_t* tile, NonFinite& bad);
void iq1_s_tile(Lanes lanes, uint8_t* tile, NonFinite& bad);
void iq1_m_tile(Lanes lanes, uint8_t* tile, NonFinite& bad);

}  // namespace moestro

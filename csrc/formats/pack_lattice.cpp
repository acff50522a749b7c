// Shuffles of ggml's IQ types into lattice tiles (formats/lattice.h). A source block, 256 channels
// of one row, is read into a Row and written to its lane of the tile.
#include <bit>

#include "formats/pack_shuffles.h"

namespace moestro {
namespace {

// A source block, apart from d.
struct Row {
  uint16_t numbers[64];
  uint8_t scales[16];
  uint8_t signs[32];  // bit i of byte n: channel 8n + i
  uint16_t minus[8];  // per block of 32: bit m for the m-th part of it
};

uint16_t half_word(const uint8_t* p) {
  uint16_t w;
  std::memcpy(&w, p, 2);
  return w;
}

// Seven signs, and an eighth that makes the number of negative weights even.
uint8_t eight_signs(uint32_t seven) {
  return static_cast<uint8_t>(seven | (std::popcount(seven) & 1u) << 7);
}

// Four times seven bits of signs and a scale per 32 channels.
void read_scales_and_signs(uint32_t packed, int block, Row& row) {
  row.scales[block] = static_cast<uint8_t>(packed >> 28);
  for (int i = 0; i < 4; ++i) row.signs[4 * block + i] = eight_signs(packed >> (7 * i) & 127);
}

void read_nibbles(const uint8_t* from, int bytes, uint8_t* out) {
  for (int i = 0; i < bytes; ++i) {
    out[2 * i] = from[i] & 15;
    out[2 * i + 1] = from[i] >> 4;
  }
}

template <class Layout>
void put_numbers(uint8_t* block, int c, const uint16_t* numbers) {
  constexpr int kHalves = 8 / Layout::kRow;
  uint8_t* bits = block + lattice_bits_at<Layout>();
  for (int n = 0; n < 4 * kHalves; ++n) {
    block[n / 4 * 64 + c * 4 + n % 4] = static_cast<uint8_t>(numbers[n]);
    const int bit = lattice_bit(n % 4, c);
    for (int p = 0; p < Layout::kHigh; ++p)
      bits[(n / 4 * Layout::kHigh + p) * 8 + bit / 8] |=
          static_cast<uint8_t>((numbers[n] >> (8 + p) & 1) << (bit % 8));
  }
}

void put_signs(uint8_t* plane, int c, const uint8_t* signs) {
  uint32_t out = 0;
  for (int j = 0; j < 8; ++j) {
    const uint32_t four = signs[j / 2] >> (j % 2 * 4) & 15u;
    out |= (four * 0x00204081u & 0x01010101u) << j;  // bit i to byte i
  }
  put(plane + c * 4, out);
}

template <class Layout>
void put_row(uint8_t* tile, int c, const Row& row) {
  for (int i = 0; i < 4 * Layout::kSteps; ++i)
    tile[32 + i * 16 + c] = static_cast<uint8_t>(row.scales[2 * i] | row.scales[2 * i + 1] << 4);
  for (int b = 0; b < 8; ++b) {
    uint8_t* block = tile + Layout::kHeader + b * Layout::kBlock;
    uint8_t* more = block + lattice_signs_at<Layout>();
    put_numbers<Layout>(block, c, row.numbers + b * 32 / Layout::kRow);
    if constexpr (Layout::kMinus > 0) {
      for (int m = 0; m < Layout::kMinus; ++m)
        more[2 * m + c / 8] |= static_cast<uint8_t>((row.minus[b] >> m & 1) << (c % 8));
    } else {
      put_signs(more, c, row.signs + 4 * b);
    }
  }
}

// read(source block, row) for each lane, d from the float16 at kScale.
template <class Layout, int kScale, class Read>
void fill(Lanes lanes, uint8_t* tile, NonFinite& bad, Read read) {
  std::memset(tile, 0, Layout::kHeader + 8 * Layout::kBlock);
  for (int c = 0; c < kTileChannels; ++c) {
    Row row;
    if constexpr (kScale >= 0) put_half(tile, c, lanes[c] + kScale, bad.count[0]);
    read(lanes[c], row);
    put_row<Layout>(tile, c, row);
  }
}

}  // namespace

// float16 d, 8 x (4 numbers, signs and scale).
void iq2_xxs_tile(Lanes lanes, uint8_t* tile, NonFinite& bad) {
  fill<Iq2xxsLayout, 0>(lanes, tile, bad, [](const uint8_t* from, Row& row) {
    for (int b = 0; b < 8; ++b) {
      for (int i = 0; i < 4; ++i) row.numbers[4 * b + i] = from[2 + 8 * b + i];
      read_scales_and_signs(word(from + 6 + 8 * b), b, row);
    }
  });
}

// float16 d, 32 x (9 bits of number, 7 signs), 16 scales.
void iq2_xs_tile(Lanes lanes, uint8_t* tile, NonFinite& bad) {
  fill<Iq2xsLayout, 0>(lanes, tile, bad, [](const uint8_t* from, Row& row) {
    for (int n = 0; n < 32; ++n) {
      const uint16_t both = half_word(from + 2 + 2 * n);
      row.numbers[n] = both & 511;
      row.signs[n] = eight_signs(both >> 9);
    }
    read_nibbles(from + 66, 8, row.scales);
  });
}

// float16 d, 32 low bytes of numbers, 32 x 8 signs, 32 x 2 bits of numbers, 16 scales.
void iq2_s_tile(Lanes lanes, uint8_t* tile, NonFinite& bad) {
  fill<Iq2sLayout, 0>(lanes, tile, bad, [](const uint8_t* from, Row& row) {
    for (int n = 0; n < 32; ++n)
      row.numbers[n] =
          static_cast<uint16_t>(from[2 + n] | (from[66 + n / 4] >> (n % 4 * 2) & 3) << 8);
    std::memcpy(row.signs, from + 34, 32);
    read_nibbles(from + 74, 8, row.scales);
  });
}

// float16 d, 64 numbers, 8 x (signs and scale).
void iq3_xxs_tile(Lanes lanes, uint8_t* tile, NonFinite& bad) {
  fill<Iq3xxsLayout, 0>(lanes, tile, bad, [](const uint8_t* from, Row& row) {
    for (int n = 0; n < 64; ++n) row.numbers[n] = from[2 + n];
    for (int b = 0; b < 8; ++b) read_scales_and_signs(word(from + 66 + 4 * b), b, row);
  });
}

// float16 d, 64 low bytes of numbers, 64 ninth bits, 32 x 8 signs, 8 scales.
void iq3_s_tile(Lanes lanes, uint8_t* tile, NonFinite& bad) {
  fill<Iq3sLayout, 0>(lanes, tile, bad, [](const uint8_t* from, Row& row) {
    for (int n = 0; n < 64; ++n)
      row.numbers[n] = static_cast<uint16_t>(from[2 + n] | (from[66 + n / 8] >> (n % 8) & 1) << 8);
    std::memcpy(row.signs, from + 74, 32);
    read_nibbles(from + 106, 4, row.scales);
  });
}

// float16 d, 32 low bytes of numbers, 8 x (4 x 3 bits of numbers, scale, minus).
void iq1_s_tile(Lanes lanes, uint8_t* tile, NonFinite& bad) {
  fill<Iq1sLayout, 0>(lanes, tile, bad, [](const uint8_t* from, Row& row) {
    for (int b = 0; b < 8; ++b) {
      const uint16_t high = half_word(from + 34 + 2 * b);
      for (int i = 0; i < 4; ++i)
        row.numbers[4 * b + i] =
            static_cast<uint16_t>(from[2 + 4 * b + i] | (high >> (3 * i) & 7) << 8);
      row.scales[b] = high >> 12 & 7;
      row.minus[b] = high >> 15;
    }
  });
}

// 32 low bytes of numbers, 32 x (3 bits of numbers, minus), 4 x (4 x 3 bits of scales, a nibble of
// the float16 d).
void iq1_m_tile(Lanes lanes, uint8_t* tile, NonFinite& bad) {
  fill<Iq1mLayout, -1>(lanes, tile, bad, [](const uint8_t* from, Row& row) {
    for (int b = 0; b < 8; ++b) row.minus[b] = 0;
    for (int n = 0; n < 32; ++n) {
      const int high = from[32 + n / 2] >> (n % 2 * 4) & 15;
      row.numbers[n] = static_cast<uint16_t>(from[n] | (high & 7) << 8);
      row.minus[n / 4] |= static_cast<uint16_t>((high >> 3) << (n % 4));
    }
    for (int s = 0; s < 16; ++s)
      row.scales[s] = half_word(from + 48 + s / 4 * 2) >> (s % 4 * 3) & 7;
  });
  for (int c = 0; c < kTileChannels; ++c) {
    uint16_t d = 0;
    for (int i = 0; i < 4; ++i)
      d |= static_cast<uint16_t>(half_word(lanes[c] + 48 + 2 * i) >> 12 << (4 * i));
    put_half(tile, c, reinterpret_cast<const uint8_t*>(&d), bad.count[0]);
  }
}

}  // namespace moestro

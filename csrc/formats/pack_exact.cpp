#include "formats/pack_exact.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/error.h"
#include "core/team.h"

namespace moestro {
namespace {

// Source blocks of one tile, by channel.
using Lanes = const uint8_t* const (&)[kTileChannels];

// NaNs and infinities found, by kind of value (see Shuffle::values).
struct NonFinite {
  int64_t count[2] = {0, 0};
};

uint32_t word(const uint8_t* p) {
  uint32_t w;
  std::memcpy(&w, p, 4);
  return w;
}

void put(uint8_t* p, uint32_t w) { std::memcpy(p, &w, 4); }

// Copies a float16 into the tile's header and counts it if it is not finite.
void put_half(uint8_t* header, int c, const uint8_t* from, int64_t& bad) {
  uint16_t h;
  std::memcpy(&h, from, 2);
  bad += (h & 0x7c00) == 0x7c00;
  std::memcpy(header + 2 * c, &h, 2);
}

template <class Word, Word kExponent>
int64_t count_nonfinite(const uint8_t* p) {
  int64_t bad = 0;
  for (int k = 0; k < kBlockChannels; ++k) {
    Word w;
    std::memcpy(&w, p + k * sizeof(Word), sizeof(Word));
    bad += (w & kExponent) == kExponent;
  }
  return bad;
}

void f32_tile(Lanes lanes, uint8_t* tile, NonFinite& bad) {
  for (int c = 0; c < kTileChannels; ++c) {
    bad.count[0] += count_nonfinite<uint32_t, 0x7f800000u>(lanes[c]);
    for (int k = 0; k < kBlockChannels; ++k) put(tile + (k * 16 + c) * 4, word(lanes[c] + 4 * k));
  }
}

// Two channels at a time, so that whole words are stored.
void f16_tile(Lanes lanes, uint8_t* tile, NonFinite& bad) {
  for (int c = 0; c < kTileChannels; c += 2) {
    bad.count[0] += count_nonfinite<uint16_t, 0x7c00>(lanes[c]);
    bad.count[0] += count_nonfinite<uint16_t, 0x7c00>(lanes[c + 1]);
    for (int k = 0; k < kBlockChannels; k += 2) {
      const uint32_t a = word(lanes[c] + 2 * k), b = word(lanes[c + 1] + 2 * k);
      put(tile + (k * 16 + c) * 2, (a & 0xffffu) | (b << 16));
      put(tile + ((k + 1) * 16 + c) * 2, (a >> 16) | (b & 0xffff0000u));
    }
  }
}

void bf16_tile(Lanes lanes, uint8_t* tile, NonFinite& bad) {
  for (int c = 0; c < kTileChannels; ++c) {
    bad.count[0] += count_nonfinite<uint16_t, 0x7f80>(lanes[c]);
    for (int pair = 0; pair < kBlockChannels / 2; ++pair)
      put(tile + (pair * 16 + c) * 4, word(lanes[c] + 4 * pair));
  }
}

// Q8_0: float16 d, 32 signed bytes.
void q8_0_tile(Lanes lanes, uint8_t* tile, NonFinite& bad) {
  for (int c = 0; c < kTileChannels; ++c) {
    put_half(tile, c, lanes[c], bad.count[0]);
    for (int j = 0; j < 8; ++j)
      put(tile + Int8Layout::kHeader + j * 64 + c * 4, word(lanes[c] + 2 + 4 * j) ^ 0x80808080u);
  }
}

// Q4_0: float16 d, 16 bytes that pair channels as we do.
void q4_0_tile(Lanes lanes, uint8_t* tile, NonFinite& bad) {
  for (int c = 0; c < kTileChannels; ++c) {
    put_half(tile, c, lanes[c], bad.count[0]);
    for (int j = 0; j < 4; ++j)
      put(tile + Int4Layout::kHeader + j * 64 + c * 4, word(lanes[c] + 2 + 4 * j));
  }
}

// Q4_1: float16 d, float16 m, 16 bytes as Q4_0.
void q4_1_tile(Lanes lanes, uint8_t* tile, NonFinite& bad) {
  for (int c = 0; c < kTileChannels; ++c) {
    put_half(tile, c, lanes[c], bad.count[0]);
    put_half(tile + 32, c, lanes[c] + 2, bad.count[1]);
    for (int j = 0; j < 4; ++j)
      put(tile + Int4MinLayout::kHeader + j * 64 + c * 4, word(lanes[c] + 4 + 4 * j));
  }
}

constexpr uint32_t kLow = 0x0f0f0f0fu;

// Of four bytes with two channels each: the channels in low nibbles, or those in high nibbles.
uint32_t nibbles(uint32_t w, bool high) { return (high ? w >> 4 : w) & kLow; }

// Q4_K: float16 d, float16 dmin, 12 bytes of 6-bit scales and minima, 128 bytes of which each 32
// hold two blocks: the first in the low, the second in the high nibbles.
void q4_k_tile(Lanes lanes, uint8_t* tile, NonFinite& bad) {
  for (int c = 0; c < kTileChannels; ++c) {
    const uint8_t* from = lanes[c];
    put_half(tile, c, from, bad.count[0]);
    put_half(tile + 32, c, from + 2, bad.count[1]);
    uint8_t* scales = tile + 64 + c;
    uint8_t* minima = tile + 192 + c;
    for (int i = 0; i < 4; ++i) {
      const uint8_t a = from[4 + i], b = from[8 + i], both = from[12 + i];
      scales[i * 16] = a & 63;
      minima[i * 16] = b & 63;
      scales[(4 + i) * 16] = static_cast<uint8_t>((both & 15) | (a >> 6 << 4));
      minima[(4 + i) * 16] = static_cast<uint8_t>((both >> 4) | (b >> 6 << 4));
    }
    for (int block = 0; block < K4Layout::kTileBlocks; ++block) {
      const uint8_t* codes = from + 16 + block / 2 * 32;
      uint8_t* to = tile + K4Layout::kHeader + block * K4Layout::kBlock + c * 4;
      for (int j = 0; j < 4; ++j) {
        const uint32_t first = nibbles(word(codes + 4 * j), block % 2);
        const uint32_t second = nibbles(word(codes + 16 + 4 * j), block % 2);
        put(to + j * 64, first | second << 4);
      }
    }
  }
}

// Q6_K: 128 bytes of low nibbles, 64 of high bits, 16 signed scales, float16 d. Per 128 channels:
// 64 bytes with channels 0..63 in the low and 64..127 in the high nibbles, and 32 bytes whose bit
// pairs belong to channels l, l + 32, l + 64, l + 96.
void q6_k_tile(Lanes lanes, uint8_t* tile, NonFinite& bad) {
  for (int c = 0; c < kTileChannels; ++c) {
    const uint8_t* from = lanes[c];
    put_half(tile, c, from + 208, bad.count[0]);
    for (int sub = 0; sub < 16; ++sub) tile[32 + sub * 16 + c] = from[192 + sub];
    for (int block = 0; block < K6Layout::kTileBlocks; ++block) {
      const int half = block / 4, quarter = block % 4;
      const uint8_t* low = from + half * 64 + quarter % 2 * 32;
      const uint8_t* high = from + 128 + half * 32;
      uint8_t* to = tile + K6Layout::kHeader + block * K6Layout::kBlock + c * 4;
      for (int j = 0; j < 4; ++j) {
        const uint32_t first = nibbles(word(low + 4 * j), quarter >= 2);
        const uint32_t second = nibbles(word(low + 16 + 4 * j), quarter >= 2);
        put(to + j * 64, first | second << 4);
      }
      for (int h = 0; h < 2; ++h) {
        uint32_t bits = 0;
        for (int jj = 0; jj < 4; ++jj)
          bits |= (word(high + 16 * h + 4 * jj) >> (2 * quarter) & 0x03030303u) << (2 * jj);
        put(to + 256 + h * 64, bits);
      }
    }
  }
}

// One source type into one format whose tiles are one source block wide.
struct Shuffle {
  const char* source;
  FormatKind kind;
  int tile_blocks, block_nbytes;
  void (*tile)(Lanes, uint8_t*, NonFinite&);
  const char* values[2];  // what each NonFinite counter counts, as messages call it

  int block_cols() const { return tile_blocks * kBlockChannels; }
  // Quantized rows are whole blocks; float rows end where they end.
  int64_t row_nbytes(int64_t cols) const {
    if (layout_facts(kind).is_float) return cols * block_nbytes / block_cols();
    return (cols + block_cols() - 1) / block_cols() * block_nbytes;
  }
};

constexpr Shuffle kShuffles[] = {
    {"F32", FormatKind::kF32, 1, 128, f32_tile, {"", ""}},
    {"F16", FormatKind::kF16, 1, 64, f16_tile, {"", ""}},
    {"BF16", FormatKind::kBf16, 1, 64, bf16_tile, {"", ""}},
    {"Q8_0", FormatKind::kInt8, 1, 34, q8_0_tile, {"Q8_0 scale: ", ""}},
    {"Q4_0", FormatKind::kInt4, 1, 18, q4_0_tile, {"Q4_0 scale: ", ""}},
    {"Q4_1", FormatKind::kInt4Min, 1, 20, q4_1_tile, {"Q4_1 scale: ", "Q4_1 minimum: "}},
    {"Q4_K", FormatKind::kK4, 8, 144, q4_k_tile, {"Q4_K scale: ", "Q4_K minimum scale: "}},
    {"Q6_K", FormatKind::kK6, 8, 210, q6_k_tile, {"Q6_K scale: ", ""}},
};

const Shuffle* find(const PackedMatrix& matrix, const std::string& source_type) {
  for (const Shuffle& shuffle : kShuffles)
    if (source_type == shuffle.source && shuffle.kind == matrix.kind &&
        shuffle.tile_blocks == matrix.tile_blocks)
      return &shuffle;
  return nullptr;
}

const Shuffle& find_or_throw(const PackedMatrix& matrix, const std::string& source_type) {
  const Shuffle* shuffle = find(matrix, source_type);
  if (shuffle == nullptr)
    throw Error(ErrorKind::kUnsupportedFormat, "no shuffle of " + source_type + " weights into " +
                                                   layout_facts(matrix.kind).stem + " tiles");
  return *shuffle;
}

// Rows past the last and channels past the last are zero.
constexpr uint8_t kZeros[256] = {};
constexpr int64_t kTaskTiles = 64;

struct Repack {
  const PackedMatrix& matrix;
  const Shuffle& shuffle;
  const uint8_t* raw;
  uint8_t* out;
  int64_t row_nbytes, tiles;  // tiles per 16 rows

  // Tiles [first, last) of one block of 16 rows.
  void run(int64_t row_tile, int64_t first, int64_t last, NonFinite& bad) const {
    uint8_t tails[kTileChannels][256];
    const uint8_t* lanes[kTileChannels];
    uint8_t* to = out + row_tile * matrix.stride() + first * matrix.tile_bytes;
    for (int64_t tile = first; tile < last; ++tile, to += matrix.tile_bytes) {
      const int64_t at = tile * shuffle.block_nbytes;
      for (int c = 0; c < kTileChannels; ++c) {
        const int64_t row = row_tile * kTileChannels + c;
        lanes[c] = row < matrix.rows ? raw + row * row_nbytes + at : kZeros;
        if (row >= matrix.rows || at + shuffle.block_nbytes <= row_nbytes) continue;
        std::memset(tails[c], 0, sizeof tails[c]);
        std::memcpy(tails[c], lanes[c], static_cast<size_t>(row_nbytes - at));
        lanes[c] = tails[c];
      }
      shuffle.tile(lanes, to, bad);
    }
  }
};

}  // namespace

bool can_repack(const std::string& format, const std::string& source_type) {
  if (!is_format(format)) return false;
  // As many columns as make a row longer than the group of any source.
  return find(describe_matrix(format, 1, 512), source_type) != nullptr;
}

int64_t source_row_nbytes(const PackedMatrix& matrix, const std::string& source_type) {
  return find_or_throw(matrix, source_type).row_nbytes(matrix.cols);
}

void repack(const PackedMatrix& matrix, const std::string& source_type, const uint8_t* raw,
            uint8_t* out) {
  const Shuffle& shuffle = find_or_throw(matrix, source_type);
  const int64_t tiles = matrix.padded_cols / shuffle.block_cols();
  const Repack job{matrix, shuffle, raw, out, shuffle.row_nbytes(matrix.cols), tiles};
  const int64_t pieces = (tiles + kTaskTiles - 1) / kTaskTiles;
  std::atomic<int64_t> totals[2] = {0, 0};
  run_on_team([&](Worker& worker) {
    worker.for_tasks(matrix.row_tiles() * pieces, [&](int64_t task) {
      const int64_t first = task % pieces * kTaskTiles;
      NonFinite bad;
      job.run(task / pieces, first, std::min(first + kTaskTiles, tiles), bad);
      for (int i = 0; i < 2; ++i) totals[i].fetch_add(bad.count[i], std::memory_order_relaxed);
    });
  });
  const bool is_float = layout_facts(matrix.kind).is_float;
  const int64_t values = matrix.rows * (is_float ? matrix.cols : tiles);
  for (int i = 0; i < 2; ++i)
    if (const int64_t bad = totals[i].load(); bad > 0)
      throw Error(ErrorKind::kCheckpoint, shuffle.values[i] + std::to_string(bad) + " of " +
                                              std::to_string(values) + " weights are not finite");
}

}  // namespace moestro

#include "formats/pack_exact.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/error.h"
#include "core/team.h"
#include "formats/pack_shuffles.h"
#include "formats/transpose.h"

namespace moestro {
namespace {

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
  for (int c = 0; c < kTileChannels; ++c) put_half(tile, c, lanes[c], bad.count[0]);
  for (int c = 0; c < kTileChannels; c += 4) {
    for (int half = 0; half < 2; ++half) {
      Quad q[4];
      for (int i = 0; i < 4; ++i) q[i] = quad(lanes[c + i] + 2 + 16 * half) ^ 0x80808080u;
      put_words(tile + Int8Layout::kHeader + half * 256 + c * 4, q);
    }
  }
}

// 16 bytes of each channel that pair channels as we do.
void put_pairs(Lanes lanes, int at, uint8_t* block) {
  for (int c = 0; c < kTileChannels; c += 4) {
    Quad q[4];
    for (int i = 0; i < 4; ++i) q[i] = quad(lanes[c + i] + at);
    put_words(block + c * 4, q);
  }
}

// Q4_0: float16 d, 16 bytes of pairs.
void q4_0_tile(Lanes lanes, uint8_t* tile, NonFinite& bad) {
  for (int c = 0; c < kTileChannels; ++c) put_half(tile, c, lanes[c], bad.count[0]);
  put_pairs(lanes, 2, tile + Int4Layout::kHeader);
}

// Q4_1: float16 d, float16 m, 16 bytes as Q4_0.
void q4_1_tile(Lanes lanes, uint8_t* tile, NonFinite& bad) {
  for (int c = 0; c < kTileChannels; ++c) {
    put_half(tile, c, lanes[c], bad.count[0]);
    put_half(tile + 32, c, lanes[c] + 2, bad.count[1]);
  }
  put_pairs(lanes, 4, tile + Int4MinLayout::kHeader);
}

constexpr uint32_t kLow = 0x0f0f0f0fu;

// Channels 0..15 and 16..31 of a block, in the low or in the high nibbles of their bytes, as pairs.
Quad pairs(Quad first, Quad second, bool high) {
  if (high) return (first >> 4 & kLow) | (second & ~kLow);
  return (first & kLow) | (second & kLow) << 4;
}

// 6-bit scales and minima of Q4_K's eight blocks, in 12 bytes: of four channels.
void put_k4_scales(const uint8_t* const lanes[4], uint8_t* scales, uint8_t* minima) {
  uint32_t s[2][4], m[2][4];
  for (int i = 0; i < 4; ++i) {
    const uint32_t a = word(lanes[i] + 4), b = word(lanes[i] + 8), both = word(lanes[i] + 12);
    s[0][i] = a & 0x3f3f3f3fu;
    m[0][i] = b & 0x3f3f3f3fu;
    s[1][i] = (both & kLow) | (a >> 2 & 0x30303030u);
    m[1][i] = (both >> 4 & kLow) | (b >> 2 & 0x30303030u);
  }
  for (int half = 0; half < 2; ++half) {
    put_bytes(scales + half * 64, s[half]);
    put_bytes(minima + half * 64, m[half]);
  }
}

// Q4_K: float16 d, float16 dmin, 12 bytes of scales and minima, 128 bytes of which each 32 hold two
// blocks: the first in the low, the second in the high nibbles.
void q4_k_tile(Lanes lanes, uint8_t* tile, NonFinite& bad) {
  for (int c = 0; c < kTileChannels; ++c) {
    put_half(tile, c, lanes[c], bad.count[0]);
    put_half(tile + 32, c, lanes[c] + 2, bad.count[1]);
  }
  for (int c = 0; c < kTileChannels; c += 4) {
    put_k4_scales(lanes + c, tile + 64 + c, tile + 192 + c);
    for (int block = 0; block < K4Layout::kTileBlocks; ++block) {
      Quad q[4];
      for (int i = 0; i < 4; ++i) {
        const uint8_t* codes = lanes[c + i] + 16 + block / 2 * 32;
        q[i] = pairs(quad(codes), quad(codes + 16), block % 2 != 0);
      }
      put_words(tile + K4Layout::kHeader + block * K4Layout::kBlock + c * 4, q);
    }
  }
}

// Q6_K: 128 bytes of low nibbles, 64 of high bits, 16 signed scales, float16 d. Per 128 channels:
// 64 bytes with channels 0..63 in the low and 64..127 in the high nibbles, and 32 bytes whose bit
// pairs belong to channels l, l + 32, l + 64, l + 96.
void q6_k_tile(Lanes lanes, uint8_t* tile, NonFinite& bad) {
  for (int c = 0; c < kTileChannels; ++c) put_half(tile, c, lanes[c] + 208, bad.count[0]);
  for (int c = 0; c < kTileChannels; c += 4) {
    for (int sub = 0; sub < 16; sub += 4) {
      uint32_t scales[4];
      for (int i = 0; i < 4; ++i) scales[i] = word(lanes[c + i] + 192 + sub);
      put_bytes(tile + 32 + sub * 16 + c, scales);
    }
    for (int block = 0; block < K6Layout::kTileBlocks; ++block) {
      const int half = block / 4, quarter = block % 4;
      uint8_t* to = tile + K6Layout::kHeader + block * K6Layout::kBlock + c * 4;
      Quad q[4];
      for (int i = 0; i < 4; ++i) {
        const uint8_t* low = lanes[c + i] + half * 64 + quarter % 2 * 32;
        q[i] = pairs(quad(low), quad(low + 16), quarter >= 2);
      }
      put_words(to, q);
      for (int h = 0; h < 2; ++h) {
        for (int i = 0; i < 4; ++i) q[i] = quad(lanes[c + i] + 128 + half * 32 + 16 * h);
        transpose(q);
        Quad bits = q[0] >> (2 * quarter) & 0x03030303u;
        for (int jj = 1; jj < 4; ++jj) bits |= (q[jj] >> (2 * quarter) & 0x03030303u) << (2 * jj);
        put_quad(to + 256 + h * 64, bits);
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
    {"IQ2_XXS", FormatKind::kIq2xxs, 8, 66, iq2_xxs_tile, {"IQ2_XXS scale: ", ""}},
    {"IQ2_XS", FormatKind::kIq2xs, 8, 74, iq2_xs_tile, {"IQ2_XS scale: ", ""}},
    {"IQ2_S", FormatKind::kIq2s, 8, 82, iq2_s_tile, {"IQ2_S scale: ", ""}},
    {"IQ3_XXS", FormatKind::kIq3xxs, 8, 98, iq3_xxs_tile, {"IQ3_XXS scale: ", ""}},
    {"IQ3_S", FormatKind::kIq3s, 8, 110, iq3_s_tile, {"IQ3_S scale: ", ""}},
    {"IQ1_S", FormatKind::kIq1s, 8, 50, iq1_s_tile, {"IQ1_S scale: ", ""}},
    {"IQ1_M", FormatKind::kIq1m, 8, 56, iq1_m_tile, {"IQ1_M scale: ", ""}},
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
            uint8_t* out, bool alone) {
  const Shuffle& shuffle = find_or_throw(matrix, source_type);
  const int64_t tiles = matrix.padded_cols / shuffle.block_cols();
  const Repack job{matrix, shuffle, raw, out, shuffle.row_nbytes(matrix.cols), tiles};
  const int64_t pieces = (tiles + kTaskTiles - 1) / kTaskTiles;
  std::atomic<int64_t> totals[2] = {0, 0};
  const int64_t tasks = matrix.row_tiles() * pieces;
  const auto shuffle_piece = [&](int64_t task) {
    const int64_t first = task % pieces * kTaskTiles;
    NonFinite bad;
    job.run(task / pieces, first, std::min(first + kTaskTiles, tiles), bad);
    for (int i = 0; i < 2; ++i) totals[i].fetch_add(bad.count[i], std::memory_order_relaxed);
  };
  if (alone) {
    for (int64_t task = 0; task < tasks; ++task) shuffle_piece(task);
  } else {
    run_on_team([&](Worker& worker) { worker.for_tasks(tasks, shuffle_piece); });
  }
  const bool is_float = layout_facts(matrix.kind).is_float;
  const int64_t values = matrix.rows * (is_float ? matrix.cols : tiles);
  for (int i = 0; i < 2; ++i)
    if (const int64_t bad = totals[i].load(); bad > 0)
      throw Error(ErrorKind::kCheckpoint, shuffle.values[i] + std::to_string(bad) + " of " +
                                              std::to_string(values) + " weights are not finite");
}

}  // namespace moestro

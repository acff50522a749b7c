#include "formats/format.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "core/half.h"

namespace moestro {
namespace {

constexpr int kGroups[] = {32, 64, 128};
constexpr int64_t kMaxExtent = int64_t{1} << 31;

// The group of a suffix "-g64" or "-row" (0), or -1.
int parse_group(const std::string& suffix) {
  if (suffix == "-row") return 0;
  for (const int group : kGroups)
    if (suffix == "-g" + std::to_string(group)) return group;
  return -1;
}

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

float half_at(const uint8_t* p, int index) {
  uint16_t h;
  std::memcpy(&h, p + 2 * index, 2);
  return f16_to_f32(h);
}

int nibble(const uint8_t* block, int k, int c) {
  const uint8_t byte = block[(k % 16) / 4 * 64 + c * 4 + k % 4];
  return k < 16 ? byte & 15 : byte >> 4;
}

// Bits of the pair plane and of the bit plane.
int pair_bits(const uint8_t* plane, int k, int c) {
  return plane[k / 16 * 64 + c * 4 + k % 4] >> (2 * (k / 4 % 4)) & 3;
}
int plane_bit(const uint8_t* plane, int k, int c) { return plane[c * 4 + k % 4] >> (k / 4) & 1; }
int five_bits(const uint8_t* block, int k, int c) {
  return nibble(block, k, c) | plane_bit(block + 256, k, c) << 4;
}

// d * code - dmin * minimum of one sub-block, the header of k4 and k5.
float k4_element(const uint8_t* tile, int b, int c, int code) {
  const float scale = half_at(tile, c) * static_cast<float>(tile[64 + b * 16 + c]);
  const float low = half_at(tile + 32, c) * static_cast<float>(tile[192 + b * 16 + c]);
  return scale * static_cast<float>(code) - low;
}

float k2_element(const uint8_t* tile, int b, int k, int c, int code) {
  const uint8_t both = tile[64 + (2 * b + k / 16) * 16 + c];
  const float scale = half_at(tile, c) * static_cast<float>(both & 15);
  const float low = half_at(tile + 32, c) * static_cast<float>(both >> 4);
  return scale * static_cast<float>(code) - low;
}

float k3_element(const uint8_t* tile, int b, int k, int c, int code) {
  const int low = tile[32 + b * 16 + c] >> (k / 16 * 4) & 15;
  const int high = tile[160 + b / 2 * 16 + c] >> (b % 2 * 4 + k / 16 * 2) & 3;
  return half_at(tile, c) * static_cast<float>((low | high << 4) - 32) *
         static_cast<float>(code - 4);
}

template <class Layout>
float lattice_element(const uint8_t* tile, int b, int k, int c) {
  const uint8_t* block = tile + Layout::kHeader + int64_t{b} * Layout::kBlock;
  const float step =
      half_at(tile, c) * Layout::kUnit * static_cast<float>(lattice_scale<Layout>(tile, b, k, c));
  return step * static_cast<float>(lattice_value<Layout>(block, k, c));
}

float any_lattice_element(FormatKind kind, const uint8_t* tile, int b, int k, int c) {
  switch (kind) {
    case FormatKind::kIq2xxs:
      return lattice_element<Iq2xxsLayout>(tile, b, k, c);
    case FormatKind::kIq2xs:
      return lattice_element<Iq2xsLayout>(tile, b, k, c);
    case FormatKind::kIq2s:
      return lattice_element<Iq2sLayout>(tile, b, k, c);
    case FormatKind::kIq3xxs:
      return lattice_element<Iq3xxsLayout>(tile, b, k, c);
    case FormatKind::kIq3s:
      return lattice_element<Iq3sLayout>(tile, b, k, c);
    case FormatKind::kIq1s:
      return lattice_element<Iq1sLayout>(tile, b, k, c);
    case FormatKind::kIq1m:
      return lattice_element<Iq1mLayout>(tile, b, k, c);
    default:
      return 0.0f;
  }
}

float float_element(FormatKind kind, const uint8_t* tile, const uint8_t* block, int k, int c) {
  uint16_t half;
  float whole;
  switch (kind) {
    case FormatKind::kF32:
      std::memcpy(&whole, block + 4 * (k * 16 + c), 4);
      return whole;
    case FormatKind::kF16:
      return half_at(block, k * 16 + c);
    case FormatKind::kBf16:
      std::memcpy(&half, block + 2 * (k / 2 * 32 + c * 2 + k % 2), 2);
      return bf16_to_f32(half);
    case FormatKind::kFp8:
      std::memcpy(&whole, tile + 4 * c, 4);
      return whole * e4m3_to_f32(block[k * 16 + c]);
    default:
      return 0.0f;
  }
}

// Element (k, c) of block `b` of a tile; k counts inside the block.
float element(FormatKind kind, const uint8_t* tile, int b, int k, int c) {
  const LayoutFacts& f = layout_facts(kind);
  const uint8_t* block = tile + f.header + int64_t{b} * f.block;
  if (f.is_float) return float_element(kind, tile, block, k, c);
  switch (kind) {
    case FormatKind::kInt8:
      return half_at(tile, c) * static_cast<float>(block[k / 4 * 64 + c * 4 + k % 4] - 128);
    case FormatKind::kInt8Zero:
      return half_at(tile, c) *
             static_cast<float>(block[k / 4 * 64 + c * 4 + k % 4] - tile[32 + c]);
    case FormatKind::kInt4:
      return half_at(tile, c) * static_cast<float>(nibble(block, k, c) - 8);
    case FormatKind::kInt4Zero:
      return half_at(tile, c) * static_cast<float>(nibble(block, k, c) - tile[32 + c]);
    case FormatKind::kInt4Min:
      return half_at(tile, c) * static_cast<float>(nibble(block, k, c)) + half_at(tile + 32, c);
    case FormatKind::kInt5:
      return half_at(tile, c) * static_cast<float>(five_bits(block, k, c) - 16);
    case FormatKind::kInt5Min:
      return half_at(tile, c) * static_cast<float>(five_bits(block, k, c)) + half_at(tile + 32, c);
    case FormatKind::kLut4Nl:
      return half_at(tile, c) * static_cast<float>(Lut4NlLayout::kValues[nibble(block, k, c)]);
    case FormatKind::kMxfp4:
      return std::ldexp(static_cast<float>(Mxfp4Layout::kValues[nibble(block, k, c)]),
                        tile[c] - 128);
    case FormatKind::kNvfp4:
      return e4m3_to_f32(tile[(2 * b + k / 16) * 16 + c]) * 0.5f *
             static_cast<float>(Nvfp4Layout::kValues[nibble(block, k, c)]);
    case FormatKind::kTernary:
      return half_at(tile, c) * static_cast<float>(pair_bits(block, k, c) - 1);
    case FormatKind::kNvfp4Scaled: {
      float d;
      std::memcpy(&d, tile + 4 * c, 4);
      return d * e4m3_to_f32(tile[64 + (2 * b + k / 16) * 16 + c]) *
             static_cast<float>(Nvfp4ScaledLayout::kValues[nibble(block, k, c)]);
    }
    case FormatKind::kK2:
      return k2_element(tile, b, k, c, pair_bits(block, k, c));
    case FormatKind::kK3:
      return k3_element(tile, b, k, c, pair_bits(block, k, c) | plane_bit(block + 128, k, c) << 2);
    case FormatKind::kK4:
      return k4_element(tile, b, c, nibble(block, k, c));
    case FormatKind::kK4Nl:
      return half_at(tile, c) * static_cast<float>(static_cast<int8_t>(tile[32 + b * 16 + c])) *
             static_cast<float>(K4NlLayout::kValues[nibble(block, k, c)]);
    case FormatKind::kK5:
      return k4_element(tile, b, c, five_bits(block, k, c));
    case FormatKind::kK6: {
      const int code = nibble(block, k, c) | pair_bits(block + 256, k, c) << 4;
      const auto sc = static_cast<int8_t>(tile[32 + (2 * b + k / 16) * 16 + c]);
      return half_at(tile, c) * static_cast<float>(sc) * static_cast<float>(code - 32);
    }
    default:
      return any_lattice_element(kind, tile, b, k, c);
  }
}

}  // namespace

PackedMatrix describe_matrix(const std::string& format, int64_t rows, int64_t cols) {
  if (rows < 1 || cols < 1 || rows >= kMaxExtent || cols >= kMaxExtent)
    throw invalid_request("a packed matrix of [" + std::to_string(rows) + ", " +
                          std::to_string(cols) + "] is not possible");
  const std::string stem = format.substr(0, format.find('-'));
  const std::string suffix = format.substr(stem.size());
  for (int i = 0; i < kFormatCount; ++i) {
    const LayoutFacts& f = kLayoutFacts[i];
    if (stem != f.stem) continue;
    int group = f.tile_blocks * kBlockChannels;
    if (f.grouped) {
      group = parse_group(suffix);
      if (group < 0) break;
      if (group == 0) group = static_cast<int>(round_up(cols, kBlockChannels));
    } else if (!suffix.empty()) {
      break;
    }
    const int tile_blocks = group / kBlockChannels;
    return {.kind = static_cast<FormatKind>(i),
            .rows = rows,
            .cols = cols,
            .padded_cols = round_up(cols, group),
            .tile_blocks = tile_blocks,
            .tile_bytes = f.header + int64_t{tile_blocks} * f.block,
            .data = nullptr};
  }
  std::string known;
  for (const auto& name : format_names()) known += (known.empty() ? "" : ", ") + name;
  throw Error(ErrorKind::kUnsupportedFormat,
              "no kernel reads weight format " + format + "; known: " + known);
}

std::vector<std::string> format_names() {
  std::vector<std::string> names;
  for (const LayoutFacts& f : kLayoutFacts) {
    if (!f.grouped) {
      names.emplace_back(f.stem);
      continue;
    }
    for (const int group : kGroups)
      names.push_back(std::string(f.stem) + "-g" + std::to_string(group));
    names.push_back(std::string(f.stem) + "-row");
  }
  return names;
}

bool is_format(const std::string& name) {
  const std::vector<std::string> names = format_names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

void decode_row(const PackedMatrix& m, int64_t row, float* out) {
  const uint8_t* tiles = m.row_tile(row / kTileChannels);
  const int c = static_cast<int>(row % kTileChannels);
  for (int64_t col = 0; col < m.cols; ++col) {
    const int64_t block = col / kBlockChannels;
    const uint8_t* tile = tiles + block / m.tile_blocks * m.tile_bytes;
    out[col] = element(m.kind, tile, static_cast<int>(block % m.tile_blocks),
                       static_cast<int>(col % kBlockChannels), c);
  }
}

}  // namespace moestro

// Formats by name, and a packed matrix as the kernels see it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/lattice.h"
#include "formats/layouts.h"

namespace moestro {

enum class FormatKind : uint8_t {
#define MOESTRO_FORMAT(kind, layout, stem, grouped) kind,
#include "formats/formats.def"
#undef MOESTRO_FORMAT
  kCount
};

constexpr int kFormatCount = static_cast<int>(FormatKind::kCount);
constexpr int kTileChannels = 16;
constexpr int kBlockChannels = 32;

// The facts of a layout struct as values.
struct LayoutFacts {
  const char* stem;
  bool grouped, is_float, pairs, has_min;
  int header, block, tile_blocks, bits, steps, zero;
};
template <class Layout>
constexpr LayoutFacts make_facts(const char* stem, bool grouped) {
  return {stem,          grouped,         Layout::kFloat, kPairs<Layout>,
          Layout::kMin,  Layout::kHeader, Layout::kBlock, Layout::kTileBlocks,
          Layout::kBits, Layout::kSteps,  Layout::kZero};
}

constexpr LayoutFacts kLayoutFacts[] = {
#define MOESTRO_FORMAT(kind, layout, stem, grouped) make_facts<layout>(stem, grouped),
#include "formats/formats.def"
#undef MOESTRO_FORMAT
};

constexpr const LayoutFacts& layout_facts(FormatKind kind) {
  return kLayoutFacts[static_cast<int>(kind)];
}

// A packed [rows, cols] matrix. The bytes belong to somebody else.
struct PackedMatrix {
  FormatKind kind;
  int64_t rows, cols;
  int64_t padded_cols;  // to the K-group
  int tile_blocks;      // blocks of 32 channels per tile
  int64_t tile_bytes;
  const uint8_t* data;

  int64_t blocks() const { return padded_cols / kBlockChannels; }
  int64_t row_tiles() const { return (rows + kTileChannels - 1) / kTileChannels; }
  // Bytes of 16 output channels.
  int64_t stride() const { return padded_cols / (tile_blocks * kBlockChannels) * tile_bytes; }
  int64_t nbytes() const { return row_tiles() * stride(); }
  const uint8_t* row_tile(int64_t n) const { return data + n * stride(); }
};

// Parses names such as "int4-g32" or "int8-row" and computes the geometry; data is left null.
// Throws Error(kUnsupportedFormat) for a name no kernel reads, kInvalidRequest for a bad shape.
PackedMatrix describe_matrix(const std::string& format, int64_t rows, int64_t cols);

// Names of all formats, those with groups once per supported group size.
std::vector<std::string> format_names();
bool is_format(const std::string& name);

// Decodes row `row` to float32 [cols].
void decode_row(const PackedMatrix& matrix, int64_t row, float* out);

}  // namespace moestro

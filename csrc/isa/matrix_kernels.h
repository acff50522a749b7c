// Leaf kernels of packed matrices: activation quantization and tile products.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/format.h"

namespace moestro {

// 32 input channels of one token as the integer kernels read them: one pointer per token.
struct alignas(16) ActivationBlock {
  int8_t q[32];
  float scale;  // amax / 127
  // One per float step; a format has a zero or a minimum, never both.
  union {
    int32_t init[2];  // -kZero * sum of q
    float sum[2];     // sum of q times scale, for formats with a minimum
  };
};
static_assert(sizeof(ActivationBlock) == 48);

// Activations prepared for one weight format: rows of padded float channels for float formats, of
// blocks for integer ones. Padding is zero.
struct Activations {
  FormatKind kind;
  int64_t blocks;           // of 32 channels per row
  float* x;                 // [rows][32 * blocks] or null; see ActivationBuffer
  ActivationBlock* packed;  // [rows][blocks] or null

  // The same rows from `row` on.
  Activations from(int64_t row) const {
    Activations rest = *this;
    if (x != nullptr) rest.x += row * blocks * 32;
    if (packed != nullptr) rest.packed += row * blocks;
    return rest;
  }
};

// Products of up to two row tiles (16 output channels each) with m activation rows.
struct TileJob {
  const uint8_t* tile[2];
  int tiles;        // 1 or 2
  int tile_blocks;  // blocks of 32 channels per tile
  int64_t tile_bytes;
  int64_t blocks;  // per row tile
  // Weights are asked for ahead of their use; past run_end, where the caller's consecutive tiles
  // end, what it reads next lies run_jump bytes on.
  const uint8_t* run_end;
  int64_t run_jump;
  Activations act;
  const int32_t* rows;  // activation row of each of the m, null for 0..m-1
  int m;
  float* out;          // [m][16 * tiles]
  std::byte* scratch;  // kTileScratchBytes, 64-byte aligned
};

constexpr int64_t kTileScratchBytes = 128 * 1024;

enum class Activation : uint8_t {
#define MOESTRO_ACTIVATION(kind, name, gate) kind,
#include "isa/activation.def"
#undef MOESTRO_ACTIVATION
  kCount
};
constexpr int kActivationCount = static_cast<int>(Activation::kCount);

// 32 gate and 32 up channels of m tokens, with what is added to each channel first.
struct GateBlock {
  const float* gate;       // [m][32]
  const float* up;         // [m][32]
  const float* gate_bias;  // [n] or null
  const float* up_bias;    // [n] or null
  int m;
  int n;  // live channels; the rest is padding
};

struct MatrixKernels {
  // Whether integer kernels of many tokens can do with bfloat16 activations: faster, other bits.
  bool folds;
  // Prepares channels [first, first + n) of activation row `row`; first is a multiple of 32.
  // Channels up to the next multiple of 32 are zero-filled.
  void (*quantize)(const float* x, int n, const Activations& act, int64_t row, int64_t first);
  // The activation of a block, prepared into block first / 32 of activation rows row0...
  void (*gate_quantize[kActivationCount])(const GateBlock& block, const Activations& act,
                                          int64_t row0, int64_t first);
  // out[index[i]][0..n) += weight[i] * (x[i][0..n) + bias[0..n)), x rows `ld` apart; bias may be
  // null
  void (*combine)(const float* x, int64_t ld, int m, int n, const float* bias, const float* weight,
                  const int32_t* index, float* out, int64_t out_ld);
  void (*tiles[kFormatCount])(const TileJob& job);
  // Bytes summed, to measure the machine's read bandwidth.
  uint64_t (*read_bytes)(const uint8_t* p, int64_t n);
  // `rounds` of 16 independent integer dot instructions of 64 products each (or what stands in for
  // it here); returns multiply-adds done.
  int64_t (*dot_peak)(int64_t rounds);
  // Likewise with float fused multiply-adds.
  int64_t (*fma_peak)(int64_t rounds);
  // Likewise with what multiplies bfloat16 pairs here: a dot of pairs, or the float multiply-add.
  int64_t (*bf16_peak)(int64_t rounds);
};

}  // namespace moestro

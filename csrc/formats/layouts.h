// Where everything lies inside a tile: 16 output channels x one K-group, header first, then blocks
// of 32 input channels. Channel c is 0..15, k counts inside a block. Multi-byte values are little
// endian.
//
//   float     (no header) f32, f16: element (k, c) at k * 16 + c; bf16: at (k / 2) * 32 + c * 2 + k
//   % 2 int8      f16 scale[16]; code (k, c) at (k / 4) * 64 + c * 4 + k % 4, value = scale * (u8 -
//   128) int4      f16 scale[16]; byte j * 64 + c * 4 + i holds k = 4j + i in its low nibble and
//             k = 16 + 4j + i in its high nibble, value = scale * (u4 - 8)
//   fp8       f32 scale[16]; e4m3 byte (k, c) at k * 16 + c, value = scale * e4m3
//   int4z     f16 scale[16], u8 zero[16]; value = scale * (u4 - zero)
//   int4m     f16 scale[16], f16 min[16]; value = scale * u4 + min
//   k4        f16 d[16], f16 dmin[16], u8 sc[8][16], u8 m[8][16]; blocks as int4,
//             value = d * sc * u4 - dmin * m                                   (ggml Q4_K)
//   k6        f16 d[16], s8 sc[16][16]; blocks of 256 B low nibbles as int4 and 128 B high bits:
//   byte
//             h * 64 + c * 4 + i, bits 2jj..2jj+1 belong to k = 4 (4h + jj) + i,
//             value = d * sc[k / 16] * (u6 - 32)                               (ggml Q6_K)
#pragma once

namespace moestro {

// kBits: of a code. kSteps: float steps (scales) per block of 32. kMin: a minimum is added per
// block. kZero: subtracted from each code. kTileBlocks: blocks per tile, 0 when the group size says
// so.
struct Int8Layout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 32, kBlock = 512, kTileBlocks = 0;
  static constexpr int kBits = 8, kSteps = 1, kZero = 128;
  static constexpr bool kMin = false;
};
struct Int4Layout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 32, kBlock = 256, kTileBlocks = 0;
  static constexpr int kBits = 4, kSteps = 1, kZero = 8;
  static constexpr bool kMin = false;
};
struct Int4ZeroLayout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 48, kBlock = 256, kTileBlocks = 0;
  static constexpr int kBits = 4, kSteps = 1, kZero = 0;
  static constexpr bool kMin = true;
};
struct Int4MinLayout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 64, kBlock = 256, kTileBlocks = 0;
  static constexpr int kBits = 4, kSteps = 1, kZero = 0;
  static constexpr bool kMin = true;
};
struct K4Layout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 320, kBlock = 256, kTileBlocks = 8;
  static constexpr int kBits = 4, kSteps = 1, kZero = 0;
  static constexpr bool kMin = true;
};
struct K6Layout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 288, kBlock = 384, kTileBlocks = 8;
  static constexpr int kBits = 6, kSteps = 2, kZero = 32;
  static constexpr bool kMin = false;
};

struct FloatLayout {
  static constexpr bool kFloat = true;
  static constexpr int kHeader = 0, kTileBlocks = 1;
  static constexpr int kBits = 0, kSteps = 0, kZero = 0;
  static constexpr bool kMin = false;
};
struct F32Layout : FloatLayout {
  static constexpr int kBlock = 2048;
};
struct F16Layout : FloatLayout {
  static constexpr int kBlock = 1024;
};
struct Bf16Layout : FloatLayout {
  static constexpr int kBlock = 1024;
};
struct Fp8Layout {
  static constexpr bool kFloat = true;
  static constexpr int kHeader = 64, kBlock = 512, kTileBlocks = 0;
  static constexpr int kBits = 0, kSteps = 0, kZero = 0;
  static constexpr bool kMin = false;
};

static_assert(Int4Layout::kHeader + Int4Layout::kBlock == 288);
static_assert(K4Layout::kHeader + 8 * K4Layout::kBlock == 2368);
static_assert(K6Layout::kHeader + 8 * K6Layout::kBlock == 3360);

}  // namespace moestro

// Where everything lies inside a tile: 16 output channels x one K-group, header first, then blocks
// of 32 input channels. Channel c is 0..15, k counts inside a block. Multi-byte values are little
// endian.
//
// clang-format off
//   float     (no header) f32, f16: element (k, c) at k * 16 + c;
//             bf16: at (k / 2) * 32 + c * 2 + k % 2
//   fp8       f32 scale[16]; e4m3 byte (k, c) at k * 16 + c; scale * e4m3
//   int8      f16 scale[16]; code (k, c) at (k / 4) * 64 + c * 4 + k % 4; scale * (u8 - 128)
//   int8z     f16 scale[16], u8 zero[16]; as int8; scale * (u8 - zero)
//   int4      f16 scale[16]; nibbles; scale * (u4 - 8)
//   int4z     f16 scale[16], u8 zero[16]; nibbles; scale * (u4 - zero)
//   int4m     f16 scale[16], f16 min[16]; nibbles; scale * u4 + min
//   int5      f16 scale[16]; nibbles, bit plane; scale * (u5 - 16)                   (ggml Q5_0)
//   int5m     f16 scale[16], f16 min[16]; nibbles, bit plane; scale * u5 + min       (ggml Q5_1)
//   lut4nl    f16 scale[16]; nibbles; scale * kValues[u4]                            (ggml IQ4_NL)
//   mxfp4     u8 e[16]; nibbles; 2^(e - 128) * kValues[u4]                           (OCP MXFP4)
//   nvfp4     u8 e4m3[4][16]; nibbles; e4m3[k / 16] / 2 * kValues[u4], 0x7f being 480 (ggml NVFP4)
//   ternary   f16 scale[16]; pair plane; scale * (u2 - 1)                (ggml TQ1_0 and TQ2_0)
//   nvfp4s    f32 d[16], e4m3 sc[8][16]; nibbles; d * sc[k / 16] * kValues[u4]     (NVIDIA NVFP4)
//   k2        f16 d[16], f16 dmin[16], u8 (sc | m << 4)[16][16]; pair plane;
//             d * sc[k / 16] * u2 - dmin * m[k / 16]                                 (ggml Q2_K)
//   k3        f16 d[16], u8 low[8][16], u8 high[4][16]; pair plane, bit plane;
//             d * (sc[k / 16] - 32) * (u3 - 4); sub-block s has the low four bits of its sc in
//             nibble s % 2 of low[s / 2] and the upper two in pair s % 4 of high[s / 4] (ggml Q3_K)
//   k4        f16 d[16], f16 dmin[16], u8 sc[8][16], u8 m[8][16]; nibbles;
//             d * sc * u4 - dmin * m                                                 (ggml Q4_K)
//   k4nl      f16 d[16], s8 sc[8][16]; nibbles; d * sc * kValues[u4]                 (ggml IQ4_XS)
//   k5        as k4; nibbles, bit plane; d * sc * u5 - dmin * m                      (ggml Q5_K)
//   k6        f16 d[16], s8 sc[16][16]; nibbles, pair plane; d * sc[k / 16] * (u6 - 32)
//                                                                                    (ggml Q6_K)
//
//   nibbles     256 B: byte j * 64 + c * 4 + i holds k = 4j + i low and k = 16 + 4j + i high
//   pair plane  128 B: byte h * 64 + c * 4 + i, bits 2jj..2jj+1 belong to k = 4 (4h + jj) + i
//   bit plane   64 B: byte c * 4 + i, bit j belongs to k = 4j + i
//   A plane holds the bits of each code above those of the planes before it.
// clang-format on
#pragma once

#include <cstdint>

namespace moestro {

// kBits: codes are below 2^kBits. kSteps: float steps (scales) per block of 32. kMin: a minimum is
// added per step. kZero: subtracted from each code (0 in formats with a minimum). kTileBlocks:
// blocks per tile, 0 when the group size says so. kValues: what the stored indices stand for; the
// codes are kValues + kZero.
struct Int8Layout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 32, kBlock = 512, kTileBlocks = 0;
  static constexpr int kBits = 8, kSteps = 1, kZero = 128;
  static constexpr bool kMin = false;
};
struct Int8ZeroLayout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 48, kBlock = 512, kTileBlocks = 0;
  static constexpr int kBits = 8, kSteps = 1, kZero = 0;
  static constexpr bool kMin = true;
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
struct Int5Layout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 32, kBlock = 320, kTileBlocks = 0;
  static constexpr int kBits = 6, kSteps = 1, kZero = 16;
  static constexpr bool kMin = false;
};
struct Int5MinLayout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 64, kBlock = 320, kTileBlocks = 0;
  static constexpr int kBits = 6, kSteps = 1, kZero = 0;
  static constexpr bool kMin = true;
};
struct Lut4NlLayout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 32, kBlock = 256, kTileBlocks = 0;
  static constexpr int kBits = 8, kSteps = 1, kZero = 128;
  static constexpr bool kMin = false;
  static constexpr int8_t kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                         1,    13,   25,  38,  53,  69,  89,  113};
};
struct Mxfp4Layout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 16, kBlock = 256, kTileBlocks = 1;
  static constexpr int kBits = 6, kSteps = 1, kZero = 12;
  static constexpr bool kMin = false;
  // Twice the values of e2m1, so that they are integers.
  static constexpr int8_t kValues[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
};
struct Nvfp4Layout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 64, kBlock = 256, kTileBlocks = 2;
  static constexpr int kBits = 6, kSteps = 2, kZero = 12;
  static constexpr bool kMin = false;
  static constexpr const int8_t (&kValues)[16] = Mxfp4Layout::kValues;
};
struct Nvfp4ScaledLayout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 192, kBlock = 256, kTileBlocks = 4;
  static constexpr int kBits = 6, kSteps = 2, kZero = 12;
  static constexpr bool kMin = false;
  static constexpr const int8_t (&kValues)[16] = Mxfp4Layout::kValues;
};
struct TernaryLayout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 32, kBlock = 128, kTileBlocks = 8;
  static constexpr int kBits = 4, kSteps = 1, kZero = 1;
  static constexpr bool kMin = false;
};
struct K2Layout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 320, kBlock = 128, kTileBlocks = 8;
  static constexpr int kBits = 4, kSteps = 2, kZero = 0;
  static constexpr bool kMin = true;
};
struct K3Layout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 224, kBlock = 192, kTileBlocks = 8;
  static constexpr int kBits = 4, kSteps = 2, kZero = 4;
  static constexpr bool kMin = false;
};
struct K4Layout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 320, kBlock = 256, kTileBlocks = 8;
  static constexpr int kBits = 4, kSteps = 1, kZero = 0;
  static constexpr bool kMin = true;
};
struct K4NlLayout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 160, kBlock = 256, kTileBlocks = 8;
  static constexpr int kBits = 8, kSteps = 1, kZero = 128;
  static constexpr bool kMin = false;
  static constexpr const int8_t (&kValues)[16] = Lut4NlLayout::kValues;
};
struct K5Layout {
  static constexpr bool kFloat = false;
  static constexpr int kHeader = 320, kBlock = 320, kTileBlocks = 8;
  static constexpr int kBits = 6, kSteps = 1, kZero = 0;
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

// Layouts whose decoded elements are bfloat16 before the scale: they are multiplied in pairs where
// there is a dot of pairs.
template <class Layout>
constexpr bool kPairs = false;
template <>
constexpr bool kPairs<Bf16Layout> = true;
template <>
constexpr bool kPairs<Fp8Layout> = true;

static_assert(Int4Layout::kHeader + Int4Layout::kBlock == 288);
static_assert(Mxfp4Layout::kHeader + Mxfp4Layout::kBlock == 272);
static_assert(Nvfp4Layout::kHeader + 2 * Nvfp4Layout::kBlock == 576);
static_assert(TernaryLayout::kHeader + 8 * TernaryLayout::kBlock == 1056);
static_assert(Nvfp4ScaledLayout::kHeader + 4 * Nvfp4ScaledLayout::kBlock == 1216);
static_assert(K2Layout::kHeader + 8 * K2Layout::kBlock == 1344);
static_assert(K3Layout::kHeader + 8 * K3Layout::kBlock == 1760);
static_assert(K4Layout::kHeader + 8 * K4Layout::kBlock == 2368);
static_assert(K4NlLayout::kHeader + 8 * K4NlLayout::kBlock == 2208);
static_assert(K5Layout::kHeader + 8 * K5Layout::kBlock == 2880);
static_assert(K6Layout::kHeader + 8 * K6Layout::kBlock == 3360);

}  // namespace moestro

// Products of attention over a cache of signed bytes, on the exact integer dot of micro/: queries
// and probabilities as digits (isa/attention_kernels.h says how). Included in the anonymous
// namespace of each ISA.
#pragma once

#include "algo/attention_state.h"

// kScaleKeys channels of a scaled query.
struct QueryCodes {
  int8_t q[kScaleKeys];
  float scale;
  int32_t init;  // -128 * sum of q
};
static_assert(sizeof(QueryCodes) == kQueryCodeFloats * sizeof(float));

// A row's probabilities times the value scales of a block: scale * (128 * high + low).
struct ProbCodes {
  int8_t high[kBlockKeys];
  int8_t low[kBlockKeys];
  float scale;
  int32_t init;  // -128 * sum of 128 * high + low
};
static_assert(sizeof(ProbCodes) == kProbCodeFloats * sizeof(float));

constexpr float kLargestProb = 127 * 128;  // then high <= 127
constexpr float kLargestFloat = std::numeric_limits<float>::max();

// The largest |x|, NaN if there is one.
inline I32 max_magnitude(I32 bits, F32 x) { return i_max(bits, i_bits(f_abs(x))); }
inline float magnitude(I32 bits) { return std::bit_cast<float>(i_max_lane(bits)); }

// Codes of x [n], n a multiple of 16, at one scale; all zero where the scale is or is not finite.
inline void quantize_codes(const float* x, int n, float scale, int8_t* codes) {
  const bool usable = scale > 0.0f && scale <= kLargestFloat;
  for (int i = 0; i < n; i += 16)
    i_store_i8(codes + i, usable ? i_from_f(f_div(f_load(x + i), f_set1(scale))) : i_set1(0));
}

inline QueryCodes quantize_query(const float* x, int n) {
  QueryCodes codes{};
  alignas(64) float padded[kScaleKeys] = {};
  std::memcpy(padded, x, static_cast<size_t>(n) * sizeof(float));
  const I32 bits = max_magnitude(i_bits(f_abs(f_load(padded))), f_load(padded + 16));
  codes.scale = magnitude(bits) / 127.0f;
  quantize_codes(padded, kScaleKeys, codes.scale, codes.q);
  for (const int8_t q : codes.q) codes.init -= 128 * q;
  return codes;
}

// Probabilities of a block times value scales in place, zero for keys outside first..end-1, which
// are not seen; returns the largest, NaN if there is one.
inline float weigh_probs(F32 (&probs)[kTiles], const KeyTile* tiles, int first, int end) {
  I32 bits = i_set1(0);
#pragma GCC unroll 4
  for (int t = 0; t < kTiles; ++t) {
    const int at = t * kKeyLanes;
    if (at >= end || at + kKeyLanes <= first) {
      probs[t] = f_zero();
      continue;
    }
    F32 x = f_mul(probs[t], f_load_bf16(tiles[t].value_scales));
    if (first > at || end < at + kKeyLanes) x = keep_keys(x, first - at, end - at, 0.0f);
    bits = max_magnitude(bits, x);
    probs[t] = x;
  }
  return magnitude(bits);
}

// Weighed probabilities [kBlockKeys] in digits; codes.scale is the largest of them.
inline void quantize_probs(const float* weighed, ProbCodes& codes) {
  const float largest = codes.scale;
  const bool finite = largest <= kLargestFloat;
  // Below 2^-100 the inverse might overflow; such values cannot matter beside what others add.
  const F32 inverse = f_set1(finite && largest >= 0x1p-100f ? kLargestProb / largest : 0.0f);
  codes.scale = finite ? largest * (1.0f / kLargestProb) : std::numeric_limits<float>::quiet_NaN();
  I32 sum = i_set1(0);
#pragma GCC unroll 4
  for (int t = 0; t < kTiles; ++t) {
    const F32 x = finite ? f_load(weighed + t * kKeyLanes) : f_zero();
    const I32 n = i_from_f(f_min(f_mul(x, inverse), f_set1(kLargestProb)));
    i_store_i8(codes.high + t * kKeyLanes, i_shift_right<7>(n));
    i_store_i8(codes.low + t * kKeyLanes, i_and(n, i_set1(127)));
    sum = i_add(sum, n);
  }
  codes.init = -128 * i_sum(sum);
}

// Vectors beside each other in a block of R rows that needs two registers for each.
template <int R>
constexpr int code_width() {
  return kDirectTokens / R >= 4 ? 4 : kDirectTokens / R >= 2 ? 2 : 1;
}

// As score_block(), queries [R][groups].
template <int R, int T>
[[gnu::noinline]] void score_code_block(const QueryCodes* queries, const KeyTile* tiles, int depth,
                                        float* scores) {
  const int groups = scale_groups(depth), quads = depth / 4;
  F32 sum[R][T];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) sum[r][t] = f_zero();
  }
  for (int g = 0; g < groups; ++g) {
    const QueryCodes* q = queries + g;
    Acc<8> acc[R][T];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) acc[r][t] = Acc<8>::start(q[r * groups].init);
    }
    const int first = g * (kScaleKeys / 4), end = std::min(quads, first + kScaleKeys / 4);
    for (int k = first; k < end; ++k) {
      U8 key[T];
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        key[t] = u8_load(reinterpret_cast<const uint8_t*>(tiles[t].keys) + k * 64);
        prefetch_l2(tiles[t].next_keys + k * 64);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Quad quad = quad_load(q[r * groups].q + (k - first) * 4);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) acc[r][t].dot(key[t], quad);
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const F32 scale = f_load_bf16(tiles[t].key_scales + g * kKeyLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F32 x = f_from_i(acc[r][t].result(q[r * groups].init));
        sum[r][t] = f_fma(f_mul(x, f_set1(q[r * groups].scale)), scale, sum[r][t]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) f_store(scores + r * kBlockKeys + t * kKeyLanes, sum[r][t]);
  }
}

template <int R = kDirectTokens>
inline void score_code_rows(int rows, const QueryCodes* queries, const KeyTile* tiles, int first,
                            int end, int depth, float* scores) {
  if constexpr (R > 1) {
    if (rows < R) return score_code_rows<R - 1>(rows, queries, tiles, first, end, depth, scores);
  }
  constexpr int kWidth = code_width<R>();
  int t = first;
  for (; t + kWidth <= end; t += kWidth)
    score_code_block<R, kWidth>(queries, tiles + t, depth, scores + t * kKeyLanes);
  for (; t < end; ++t) score_code_block<R, 1>(queries, tiles + t, depth, scores + t * kKeyLanes);
}

// As value_block(), over all keys of tiles first..end-1.
template <int R, int C>
[[gnu::noinline]] void value_code_block(const ProbCodes* probs, const KeyTile* tiles, int first,
                                        int end, int column, const TileShape& shape, float* out) {
  I32 total[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) total[r][c] = i_set1(probs[r].init);
  }
  const int64_t quad_bytes = int64_t{shape.depth} * 4;
  for (int t = first; t < end;) {
    const int part_end = std::min(end, t + kAccChannels / kKeyLanes);
    Acc<8> high[R][C], low[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) high[r][c] = low[r][c] = Acc<8>::start(0);
    }
    for (; t < part_end; ++t) {
      const std::byte* v = tiles[t].values + column * 4;
      const std::byte* next = tiles[t].next_values + column * 4;
      for (int key = t * kKeyLanes; key < (t + 1) * kKeyLanes; key += 4) {
        U8 value[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
          value[c] = u8_load(reinterpret_cast<const uint8_t*>(v) + c * 64);
          prefetch_l2(next + c * 64);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const Quad h = quad_load(probs[r].high + key), l = quad_load(probs[r].low + key);
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) {
            high[r][c].dot(value[c], h);
            low[r][c].dot(value[c], l);
          }
        }
        v += quad_bytes;
        next += quad_bytes;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        const I32 sum = i_add(i_shift_left<7>(high[r][c].result(0)), low[r][c].result(0));
        total[r][c] = i_add(total[r][c], sum);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      float* to = out + r * shape.stride + column + c * 16;
      f_store(to, f_fma(f_from_i(total[r][c]), f_set1(probs[r].scale), f_load(to)));
    }
  }
}

template <int R = kDirectTokens>
inline void value_code_rows(int rows, const ProbCodes* probs, const KeyTile* tiles, int first,
                            int end, const TileShape& shape, float* out) {
  if constexpr (R > 1) {
    if (rows < R) return value_code_rows<R - 1>(rows, probs, tiles, first, end, shape, out);
  }
  constexpr int kWidth = code_width<R>();
  int c = 0;
  for (; c + kWidth * 16 <= shape.depth; c += kWidth * 16)
    value_code_block<R, kWidth>(probs, tiles, first, end, c, shape, out);
  for (; c < shape.depth; c += 16) value_code_block<R, 1>(probs, tiles, first, end, c, shape, out);
}

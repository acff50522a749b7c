// Register-blocked products of attention over float numbers: scores = queries x keys, out +=
// probabilities x values. 16-bit numbers are widened in registers on their way into the products.
// Included in the anonymous namespace of each ISA.
#pragma once

// Sixteen keys and their values, as the products read them.
struct KeyTile {
  const std::byte* keys;       // [head_dim][16]; of bytes [head_dim / 4][16][4]
  const std::byte* values;     // 16 rows, TileShape::value_stride apart; of bytes [4][head_dim][4]
  const uint16_t* key_scales;  // of bytes: [scale_groups][16]
  const uint16_t* value_scales;  // of bytes: [16]
  // The tile one block later as it lies in the cache. The products touch it while they compute, or
  // decode would wait for memory and compute by turns.
  const std::byte* next_keys;
  const std::byte* next_values;
};

struct TileShape {
  int depth;             // head_dim
  int64_t stride;        // floats between rows of the output
  int64_t value_stride;  // bytes between the values of two keys
  int64_t next_lane;     // bytes of sixteen elements in the cache
  int64_t next_value;    // bytes between the values of two keys in the cache
};

// Keeps lanes first..end-1, fill elsewhere.
inline F32 keep_keys(F32 x, int first, int end, float fill) {
  static constexpr float kIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const F32 index = f_load(kIndex), hidden = f_set1(fill);
  x = f_select_lt(index, f_set1(static_cast<float>(end)), x, hidden);
  return f_select_lt(index, f_set1(static_cast<float>(first)), hidden, x);
}

template <CacheType kType>
inline F32 load_elements(const std::byte* p) {
  if constexpr (kType == CacheType::kF16) return f_load_f16(reinterpret_cast<const uint16_t*>(p));
  if constexpr (kType == CacheType::kBf16) return f_load_bf16(reinterpret_cast<const uint16_t*>(p));
  return f_load(reinterpret_cast<const float*>(p));
}

// Most rows of a register block. Where elements are widened in registers, a few more rows gain
// little and cost compile time.
template <CacheType kType>
constexpr int block_rows() {
  return kType == CacheType::kF32 ? kFloatRows : std::min(kFloatRows, 8);
}

// How many vectors beside each other a block of R rows has room for.
template <int R>
constexpr int block_width() {
  return kFloatAccumulators / R >= 4 ? 4 : kFloatAccumulators / R >= 2 ? 2 : 1;
}

// scores[r * kBlockKeys + 16 * t + lane] = sum over d of packed[d][r] * tiles[t].keys[d][lane]
template <CacheType kType, int R, int T>
[[gnu::noinline]] void score_block(const float* packed, const KeyTile* tiles,
                                   const TileShape& shape, float* scores) {
  constexpr int64_t kBytes = kKeyLanes * cache_element_size(kType);
  constexpr int kStep = kBytes < 64 ? 2 : 1;  // vectors in a cache line; then head_dim is even
  F32 acc[R][T];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) acc[r][t] = f_zero();
  }
  const int64_t next_lane = shape.next_lane;
  for (int d = 0, depth = shape.depth; d < depth; d += kStep) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) prefetch_l2(tiles[t].next_keys + d * next_lane);
#pragma GCC unroll 2
    for (int step = 0; step < kStep; ++step, packed += R) {
      F32 key[T];
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t)
        key[t] = load_elements<kType>(tiles[t].keys + (d + step) * kBytes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const F32 q = f_set1(packed[r]);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) acc[r][t] = f_fma(q, key[t], acc[r][t]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) f_store(scores + r * kBlockKeys + t * kKeyLanes, acc[r][t]);
  }
}

// Scores of 1..R rows against tiles first..end-1.
template <CacheType kType, int R = block_rows<kType>()>
inline void score_rows(int rows, const float* packed, const KeyTile* tiles, int first, int end,
                       const TileShape& shape, float* scores) {
  if constexpr (R > 1) {
    if (rows < R) return score_rows<kType, R - 1>(rows, packed, tiles, first, end, shape, scores);
  }
  constexpr int kWidth = block_width<R>();
  int t = first;
  for (; t + kWidth <= end; t += kWidth)
    score_block<kType, R, kWidth>(packed, tiles + t, shape, scores + t * kKeyLanes);
  for (; t < end; ++t) score_block<kType, R, 1>(packed, tiles + t, shape, scores + t * kKeyLanes);
}

// out[r][16 * c + lane] += sum over keys first..end-1, ascending, of
// probs[r * kBlockKeys + key] * tiles[key / 16].values[key % 16][column + 16 * c + lane]
template <CacheType kType, int R, int C>
[[gnu::noinline]] void value_block(const float* probs, const KeyTile* tiles, int first, int end,
                                   int column, const TileShape& shape, float* out) {
  constexpr int64_t kBytes = 16 * cache_element_size(kType);
  constexpr int kStep = kBytes < 64 ? 2 : 1;
  const int64_t stride = shape.stride, value_stride = shape.value_stride;
  const int64_t next_value = shape.next_value, next_lane = shape.next_lane;
  F32 acc[R][C];
  out += column;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) acc[r][c] = f_load(out + r * stride + c * 16);
  }
  for (int key = first; key < end;) {
    const int tile_end = std::min(end, (key | (kKeyLanes - 1)) + 1);
    const KeyTile& tile = tiles[key / kKeyLanes];
    const std::byte* v = tile.values + (key % kKeyLanes) * value_stride + column / 16 * kBytes;
    const std::byte* next = tile.next_values + (key % kKeyLanes) * next_value;
    next += column / 16 * next_lane;
    for (; key < tile_end; ++key, v += value_stride, next += next_value) {
      F32 value[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        value[c] = load_elements<kType>(v + c * kBytes);
        if (c % kStep == 0) prefetch_l2(next + c * next_lane);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const F32 p = f_set1(probs[r * kBlockKeys + key]);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[r][c] = f_fma(p, value[c], acc[r][c]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) f_store(out + r * stride + c * 16, acc[r][c]);
  }
}

// Adds the values of keys first..end-1 to 1..R rows.
template <CacheType kType, int R = block_rows<kType>()>
inline void value_rows(int rows, const float* probs, const KeyTile* tiles, int first, int end,
                       const TileShape& shape, float* out) {
  if constexpr (R > 1) {
    if (rows < R) return value_rows<kType, R - 1>(rows, probs, tiles, first, end, shape, out);
  }
  constexpr int kWidth = block_width<R>();
  const int columns = static_cast<int>(shape.stride);
  int c = 0;
  for (; c + kWidth * 16 <= columns; c += kWidth * 16)
    value_block<kType, R, kWidth>(probs, tiles, first, end, c, shape, out);
  for (; c < columns; c += 16) value_block<kType, R, 1>(probs, tiles, first, end, c, shape, out);
}

// Register-blocked products of attention: scores = queries x keys, out += probabilities x values.
// Included in the anonymous namespace of each ISA.
#pragma once

// How many vectors beside each other a block of R rows has room for.
template <int R>
constexpr int block_width() {
  return kFloatAccumulators / R >= 4 ? 4 : kFloatAccumulators / R >= 2 ? 2 : 1;
}

// Sixteen keys and their values, as the products read them.
struct KeyTile {
  const float* keys;    // [head_dim][16]
  const float* values;  // [16][stride]
  // The tile one block later as it lies in the cache. The products touch it while they compute, or
  // decode would wait for memory and compute by turns.
  const std::byte* next_keys;
  const std::byte* next_values;
};

struct TileShape {
  int depth;           // head_dim
  int64_t stride;      // floats between the values of two keys, and between rows of the output
  int64_t next_lane;   // bytes of sixteen elements in the cache
  int64_t next_value;  // bytes between the values of two keys in the cache
};

// scores[r * kBlockKeys + 16 * t + lane] = sum over d of packed[d][r] * tiles[t].keys[d][lane]
template <int R, int T>
[[gnu::noinline]] void score_block(const float* packed, const KeyTile* tiles,
                                   const TileShape& shape, float* scores) {
  F32 acc[R][T];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) acc[r][t] = f_zero();
  }
  const int64_t next_lane = shape.next_lane;
  for (int d = 0, depth = shape.depth; d < depth; ++d, packed += R) {
    F32 key[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      key[t] = f_load(tiles[t].keys + d * kKeyLanes);
      prefetch_l2(tiles[t].next_keys + d * next_lane);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const F32 q = f_set1(packed[r]);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) acc[r][t] = f_fma(q, key[t], acc[r][t]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) f_store(scores + r * kBlockKeys + t * kKeyLanes, acc[r][t]);
  }
}

template <int R>
inline void score_tiles(const float* packed, const KeyTile* tiles, int first, int end,
                        const TileShape& shape, float* scores) {
  constexpr int kWidth = block_width<R>();
  for (int t = first; t < end;) {
    float* out = scores + t * kKeyLanes;
    if (kWidth >= 4 && end - t >= 4) {
      score_block<R, kWidth>(packed, tiles + t, shape, out);
      t += 4;
    } else if (kWidth >= 2 && end - t >= 2) {
      score_block<R, std::min(kWidth, 2)>(packed, tiles + t, shape, out);
      t += 2;
    } else {
      score_block<R, 1>(packed, tiles + t, shape, out);
      t += 1;
    }
  }
}

// Scores of rows 1..kFloatRows against tiles first..end-1.
template <int R = kFloatRows>
inline void score_rows(int rows, const float* packed, const KeyTile* tiles, int first, int end,
                       const TileShape& shape, float* scores) {
  if constexpr (R > 1) {
    if (rows < R) return score_rows<R - 1>(rows, packed, tiles, first, end, shape, scores);
  }
  score_tiles<R>(packed, tiles, first, end, shape, scores);
}

// out[r][16 * c + lane] += sum over keys first..end-1, ascending, of
// probs[r * kBlockKeys + key] * tiles[key / 16].values[key % 16][16 * c + lane]
template <int R, int C>
[[gnu::noinline]] void value_block(const float* probs, const KeyTile* tiles, int first, int end,
                                   int column, const TileShape& shape, float* out) {
  const int64_t stride = shape.stride, next_lane = shape.next_lane;
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
    const float* v = tile.values + (key % kKeyLanes) * stride + column;
    const std::byte* next = tile.next_values + (key % kKeyLanes) * shape.next_value;
    next += column / kKeyLanes * next_lane;
    for (; key < tile_end; ++key, v += stride, next += shape.next_value) {
      F32 value[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        value[c] = f_load(v + c * 16);
        prefetch_l2(next + c * next_lane);
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

template <int R>
inline void value_columns(const float* probs, const KeyTile* tiles, int first, int end,
                          const TileShape& shape, float* out) {
  constexpr int kWidth = block_width<R>();
  const int columns = static_cast<int>(shape.stride);
  for (int c = 0; c < columns;) {
    if (kWidth >= 4 && columns - c >= 64) {
      value_block<R, kWidth>(probs, tiles, first, end, c, shape, out);
      c += 64;
    } else if (kWidth >= 2 && columns - c >= 32) {
      value_block<R, std::min(kWidth, 2)>(probs, tiles, first, end, c, shape, out);
      c += 32;
    } else {
      value_block<R, 1>(probs, tiles, first, end, c, shape, out);
      c += 16;
    }
  }
}

// Adds the values of keys first..end-1 to 1..kFloatRows rows.
template <int R = kFloatRows>
inline void value_rows(int rows, const float* probs, const KeyTile* tiles, int first, int end,
                       const TileShape& shape, float* out) {
  if constexpr (R > 1) {
    if (rows < R) return value_rows<R - 1>(rows, probs, tiles, first, end, shape, out);
  }
  value_columns<R>(probs, tiles, first, end, shape, out);
}

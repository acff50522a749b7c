// Attention over bfloat16 caches by products of bfloat16 pairs, twice as many a cycle as float32
// ones. Scaled queries and probabilities are rounded to bfloat16 as keys and values are; sums stay
// float32, and a row is divided by the sum of its rounded probabilities. Included in the anonymous
// namespace of an ISA that has micro/bf16_pairs.h, which names kOtherCaches: the kernels that
// attend over all other caches.
//
// Keys go in pairs from even positions on. A row that sees one key of a pair meets zeros in place
// of the other, so its bits depend on its position alone, as everywhere.
#pragma once

#include "algo/attention_state.h"

// Queries: [head_dim / 2][rows of the panel][2], panels one after the other.
inline void pack_query_pairs(const QueryBlock& block, const KvHead& kv, float* to) {
  auto* packed = reinterpret_cast<uint16_t*>(to);
  const int depth = kv.head_dim;
  const Panels panels(block.rows(), kFloatRows);
  for (int first = 0; first < block.rows(); first += panels.size) {
    const int rows = panels.end(first) - first;
    for (int r = 0; r < rows; ++r) {
      const float* q = query_row(block, depth, first + r);
      for (int d = 0; d < depth; ++d)
        packed[(d / 2 * rows + r) * 2 + d % 2] = f32_to_bf16(q[d] * block.scale);
    }
    packed += rows * depth;
  }
}

// As score_block().
template <int R, int T>
[[gnu::noinline]] void score_pair_block(const uint16_t* packed, const KeyTile* tiles,
                                        const TileShape& shape, float* scores) {
  F32 acc[R][T];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) acc[r][t] = f_zero();
  }
  for (int64_t at = 0, end = shape.depth * 32; at < end; at += 64, packed += 2 * R) {
    Pair key[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      key[t] = pair_rows(tiles[t].keys + at);
      prefetch_l2(tiles[t].next_keys + at);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Pair q = pair_set1(packed + 2 * r);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) acc[r][t] = pair_dot(acc[r][t], key[t], q);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) f_store(scores + r * kBlockKeys + t * kKeyLanes, acc[r][t]);
  }
}

template <int R = kFloatRows>
inline void score_pair_rows(int rows, const uint16_t* packed, const KeyTile* tiles, int first,
                            int end, const TileShape& shape, float* scores) {
  if constexpr (R > 1) {
    if (rows < R) return score_pair_rows<R - 1>(rows, packed, tiles, first, end, shape, scores);
  }
  constexpr int kWidth = block_width<R>();
  int t = first;
  for (; t + kWidth <= end; t += kWidth)
    score_pair_block<R, kWidth>(packed, tiles + t, shape, scores + t * kKeyLanes);
  for (; t < end; ++t) score_pair_block<R, 1>(packed, tiles + t, shape, scores + t * kKeyLanes);
}

// As value_block(), over whole pairs of keys; probs [R][kBlockKeys].
template <int R, int C>
[[gnu::noinline]] void value_pair_block(const uint16_t* probs, const KeyTile* tiles, int first,
                                        int end, int column, const TileShape& shape, float* out) {
  const int64_t stride = shape.stride, key_bytes = shape.value_stride;
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
    const int64_t at = (key % kKeyLanes) * key_bytes + column * 2;
    const std::byte *v = tile.values + at, *next = tile.next_values + at;
    for (; key < tile_end; key += 2, v += 2 * key_bytes, next += 2 * key_bytes) {
      Pair value[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        value[c] = pair_rows(v + c * 32, v + key_bytes + c * 32);
        if (c % 2 == 0) {
          prefetch_l2(next + c * 32);
          prefetch_l2(next + key_bytes + c * 32);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Pair p = pair_set1(probs + r * kBlockKeys + key);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[r][c] = pair_dot(acc[r][c], value[c], p);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) f_store(out + r * stride + c * 16, acc[r][c]);
  }
}

template <int R = kFloatRows>
inline void value_pair_rows(int rows, const uint16_t* probs, const KeyTile* tiles, int first,
                            int end, const TileShape& shape, float* out) {
  if constexpr (R > 1) {
    if (rows < R) return value_pair_rows<R - 1>(rows, probs, tiles, first, end, shape, out);
  }
  constexpr int kWidth = block_width<R>();
  int c = 0;
  for (; c + kWidth * 16 <= shape.depth; c += kWidth * 16)
    value_pair_block<R, kWidth>(probs, tiles, first, end, c, shape, out);
  for (; c < shape.depth; c += 16) value_pair_block<R, 1>(probs, tiles, first, end, c, shape, out);
}

// Rows that see one key of a pair: the even one, or the odd one.
inline void value_half_pair(int rows, const uint16_t* probs, const KeyTile* tiles, int key,
                            bool odd, const TileShape& shape, float* out) {
  const KeyTile& tile = tiles[key / kKeyLanes];
  const std::byte* v = tile.values + (key % kKeyLanes + odd) * shape.value_stride;
  for (int c = 0; c < shape.depth; c += 16) {
    const Pair value = odd ? pair_odd_row(v + c * 2) : pair_even_row(v + c * 2);
    for (int r = 0; r < rows; ++r) {
      float* to = out + r * shape.stride + c;
      f_store(to, pair_dot(f_load(to), value, pair_set1(probs + r * kBlockKeys + key)));
    }
  }
}

class PairProducts {
 public:
  static bool fit(const KvHead& kv) { return kv.type == CacheType::kBf16 && kv.head_dim % 16 == 0; }

  int panel() const { return kFloatRows; }
  void load(Attending&, int, int) const {}
  void settle(Attending&, int, int) const {}

  void score(const Attending& a, int row, int rows, int tile0, int tile_end) const {
    const auto* packed = reinterpret_cast<const uint16_t*>(a.packed) + row * a.kv.head_dim;
    score_pair_rows(rows, packed, a.tiles, tile0, tile_end, a.shape, a.scores + row * kBlockKeys);
  }

  void soften(Attending& a, int row, int, int) const {
    F32 probs[kTiles];
    exponentials(a, row, probs);
    for (int t = 0; t < kTiles; ++t)
      probs[t] = round_to_bf16(rounded(a, row) + t * kKeyLanes, probs[t]);
    add_sum(a, row, probs);
  }

  void add(const Attending& a, int first, int end, int, int) const {
    const int heads = a.q.heads, token0 = first / heads, token1 = (end - 1) / heads;
    const int common = (a.first_key(token1) + 1) & ~1, common_end = a.end_key(token0) & ~1;
    const int last = a.end_key(token1);
    for (int key = a.first_key(token0) & ~1; key < last; key += 2) {
      if (key >= common && key < common_end) {
        add_pairs(a, first, end, key, common_end);
        key = common_end - 2;
        continue;
      }
      const Rows even = rows_that_see(a, first, end, key);
      const Rows odd = rows_that_see(a, first, end, key + 1);
      add_half(a, even.first, std::min(odd.first, even.end), key, false);
      add_pairs(a, odd.first, even.end, key, key + 2);
      add_half(a, std::max(odd.first, even.end), odd.end, key, true);
    }
  }

 private:
  static uint16_t* rounded(const Attending& a, int row) {
    return reinterpret_cast<uint16_t*>(a.extra) + row * kBlockKeys;
  }

  struct Rows {
    int first;
    int end;
  };
  // Of rows first..end-1 those that see a key: of its own token and later ones, as long as it is in
  // their window.
  static Rows rows_that_see(const Attending& a, int first, int end, int key) {
    const int64_t distance = a.key0 + key - a.q.position, heads = a.q.heads;
    const int64_t from = std::clamp<int64_t>(distance * heads, first, end);
    const int64_t to = std::clamp<int64_t>((distance + a.q.window) * heads, from, end);
    return {static_cast<int>(from), static_cast<int>(to)};
  }

  static void add_pairs(const Attending& a, int row, int row_end, int first, int end) {
    if (row >= row_end) return;
    value_pair_rows(row_end - row, rounded(a, row), a.tiles, first, end, a.shape,
                    a.part.out + row * a.shape.stride);
  }

  static void add_half(const Attending& a, int row, int row_end, int key, bool odd) {
    if (row >= row_end) return;
    value_half_pair(row_end - row, rounded(a, row), a.tiles, key, odd, a.shape,
                    a.part.out + row * a.shape.stride);
  }
};

inline void pack_queries(const QueryBlock& block, const KvHead& head, float* packed) {
  if (PairProducts::fit(head)) return pack_query_pairs(block, head, packed);
  kOtherCaches.pack_queries(block, head, packed);
}

inline void attend(const QueryBlock& block, const KvHead& head, int64_t segment,
                   const float* packed, float* work, Partial out) {
  if (PairProducts::fit(head))
    return attend_segment(PairProducts(), block, head, segment, packed, work, out);
  kOtherCaches.attend(block, head, segment, packed, work, out);
}

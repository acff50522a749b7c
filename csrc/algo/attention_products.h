// The products of attention over float caches and over caches of bytes. Included in the anonymous
// namespace of each ISA.
#pragma once

#include "algo/attention_codes.h"
#include "algo/attention_state.h"

// How the products read a cache. It changes speed, never bits, but for bytes.
enum class Reading {
  kDirect,   // in place, widened in registers: for few rows
  kWidened,  // from scratch that holds a block of floats: for many rows
  kCodes,    // bytes, in place
};

// The type of what lies where the products read.
struct Plan {
  Reading reading;
  CacheType type;
  int panel;  // most rows of a register block

  static Plan of(const KvHead& kv, int rows) {
    if (kv.type == CacheType::kInt8) return {Reading::kCodes, kv.type, kDirectTokens};
    const bool whole = kv.head_dim % 16 == 0;
    if (kv.type == CacheType::kF32)
      return {whole ? Reading::kDirect : Reading::kWidened, kv.type, kFloatRows};
    constexpr int kRows = block_rows<CacheType::kF16>();
    if (whole && rows <= 2 * kRows) return {Reading::kDirect, kv.type, kRows};
    return {Reading::kWidened, CacheType::kF32, kFloatRows};
  }
};

// packed: QueryCodes [rows][scale_groups]
inline void pack_query_codes(const QueryBlock& block, int depth, float* packed) {
  alignas(64) float scaled[kMaxHeadDim];
  for (int row = 0; row < block.rows(); ++row) {
    const float* q = query_row(block, depth, row);
    for (int d = 0; d < depth; ++d) scaled[d] = q[d] * block.scale;
    for (int d = 0; d < depth; d += kScaleKeys, packed += kQueryCodeFloats) {
      const QueryCodes codes = quantize_query(scaled + d, std::min(kScaleKeys, depth - d));
      std::memcpy(packed, &codes, sizeof codes);
    }
  }
}

// packed: panels one after the other, each [head_dim][rows of the panel]
inline void pack_queries(const QueryBlock& block, const KvHead& kv, float* packed) {
  const int depth = kv.head_dim;
  if (kv.type == CacheType::kInt8) return pack_query_codes(block, depth, packed);
  const Panels panels(block.rows(), Plan::of(kv, block.rows()).panel);
  for (int first = 0; first < block.rows(); first += panels.size) {
    const int rows = panels.end(first) - first;
    for (int r = 0; r < rows; ++r) {
      const float* q = query_row(block, depth, first + r);
      for (int d = 0; d < depth; ++d) packed[d * rows + r] = q[d] * block.scale;
    }
    packed += rows * depth;
  }
}

inline float load_cached_one(CacheType type, const std::byte* p) {
  if (type == CacheType::kF32) return *reinterpret_cast<const float*>(p);
  const uint16_t half = *reinterpret_cast<const uint16_t*>(p);
  return type == CacheType::kF16 ? f16_to_f32(half) : bf16_to_f32(half);
}

inline F32 load_cached(CacheType type, const std::byte* p) {
  if (type == CacheType::kF16) return load_elements<CacheType::kF16>(p);
  if (type == CacheType::kBf16) return load_elements<CacheType::kBf16>(p);
  return load_elements<CacheType::kF32>(p);
}

// rows x n elements widened, each row padded with zeros to a multiple of 16.
inline void widen(CacheType type, const std::byte* from, int rows, int n, float* to) {
  const int64_t size = cache_element_size(type);
  for (int r = 0; r < rows; ++r, from += n * size) {
    int i = 0;
    for (; i + 16 <= n; i += 16, to += 16) f_store(to, load_cached(type, from + i * size));
    if (i == n) continue;
    f_store(to, f_zero());
    for (int lane = 0; i < n; ++i, ++lane) to[lane] = load_cached_one(type, from + i * size);
    to += 16;
  }
}

class Products {
 public:
  Products(const QueryBlock& q, const KvHead& kv) : plan_(Plan::of(kv, q.rows())) {}

  int panel() const { return plan_.panel; }

  void load(Attending& a, int first, int end) const {
    if (plan_.reading != Reading::kWidened) return;
    const int depth = a.kv.head_dim;
    a.shape.value_stride = a.shape.stride * int64_t{sizeof(float)};
    for (int t = first; t < end; ++t) {
      KeyTile& tile = a.tiles[t];
      if (a.kv.type != CacheType::kF32) {
        float* wide = a.extra + t * kKeyLanes * depth;
        widen(a.kv.type, tile.keys, depth, kKeyLanes, wide);
        tile.keys = reinterpret_cast<const std::byte*>(wide);
      }
      float* wide = a.extra + (kBlockKeys + t * kKeyLanes) * a.shape.stride;
      widen(a.kv.type, tile.values, kKeyLanes, depth, wide);
      tile.values = reinterpret_cast<const std::byte*>(wide);
    }
  }

  void score(const Attending& a, int row, int rows, int tile0, int tile_end) const {
    float* scores = a.scores + row * kBlockKeys;
    if (plan_.reading == Reading::kCodes) {
      const int groups = scale_groups(a.kv.head_dim);
      const auto* queries = reinterpret_cast<const QueryCodes*>(a.packed) + row * groups;
      return score_code_rows(rows, queries, a.tiles, tile0, tile_end, a.kv.head_dim, scores);
    }
    const float* packed = a.packed + row * a.kv.head_dim;
    if (plan_.type == CacheType::kF16)
      return score_rows<CacheType::kF16>(rows, packed, a.tiles, tile0, tile_end, a.shape, scores);
    if (plan_.type == CacheType::kBf16)
      return score_rows<CacheType::kBf16>(rows, packed, a.tiles, tile0, tile_end, a.shape, scores);
    score_rows<CacheType::kF32>(rows, packed, a.tiles, tile0, tile_end, a.shape, scores);
  }

  void soften(Attending& a, int row, int first, int end) const {
    F32 probs[kTiles];
    exponentials(a, row, probs);
    add_sum(a, row, probs);
    if (plan_.reading == Reading::kCodes)
      codes(a)[row].scale = weigh_probs(probs, a.tiles, first, end);
    float* to = a.scores + row * kBlockKeys;
    for (int t = 0; t < kTiles; ++t) f_store(to + t * kKeyLanes, probs[t]);
  }

  void settle(const Attending& a, int row, int row_end) const {
    if (plan_.reading != Reading::kCodes) return;
    for (int r = row; r < row_end; ++r) quantize_probs(a.scores + r * kBlockKeys, codes(a)[r]);
  }

  // Keys that all rows see go through one register block; those at the edges, which only some
  // tokens see, one by one.
  void add(const Attending& a, int first, int end, int tile0, int tile_end) const {
    if (plan_.reading == Reading::kCodes)
      return value_code_rows(end - first, codes(a) + first, a.tiles, tile0, tile_end, a.shape,
                             a.part.out + first * a.shape.stride);
    const int heads = a.q.heads, token0 = first / heads, token1 = (end - 1) / heads;
    const int common = a.first_key(token1), common_end = a.end_key(token0);
    for (int key = a.first_key(token0), last = a.end_key(token1); key < last;) {
      int row = first, row_end = end, key_end = common_end;
      if (key < common || key >= common_end) {
        const int64_t distance = a.key0 + key - a.q.position;  // of the token at the key's position
        row = static_cast<int>(std::max<int64_t>(first, distance * heads));
        row_end = static_cast<int>(std::min<int64_t>(end, (distance + a.q.window) * heads));
        key_end = key + 1;
      }
      add_panel(a, row, row_end - row, key, key_end);
      key = key_end;
    }
  }

 private:
  static ProbCodes* codes(const Attending& a) { return reinterpret_cast<ProbCodes*>(a.extra); }

  // Adds the values of keys first..end-1 to `rows` rows from `row` on.
  void add_panel(const Attending& a, int row, int rows, int first, int end) const {
    const float* probs = a.scores + row * kBlockKeys;
    float* out = a.part.out + row * a.shape.stride;
    if (plan_.type == CacheType::kF16)
      return value_rows<CacheType::kF16>(rows, probs, a.tiles, first, end, a.shape, out);
    if (plan_.type == CacheType::kBf16)
      return value_rows<CacheType::kBf16>(rows, probs, a.tiles, first, end, a.shape, out);
    value_rows<CacheType::kF32>(rows, probs, a.tiles, first, end, a.shape, out);
  }

  Plan plan_;
};

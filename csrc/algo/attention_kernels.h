// Attention kernels over the 16-lane names of simd/. Included in the anonymous namespace of each
// ISA.
#pragma once

#include "algo/attention_blocks.h"
#include "algo/attention_codes.h"
#include "algo/attention_store.h"
#include "algo/math.h"

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

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

// Rows are cut into panels of one register block, as equal as they come.
struct Panels {
  Panels(int rows, int most) : rows_(rows) {
    const int count = (rows + most - 1) / most;
    size = (rows + count - 1) / count;
  }
  int end(int first) const { return std::min(rows_, first + size); }

  int size;

 private:
  int rows_;
};

inline const float* query_row(const QueryBlock& block, int head_dim, int row) {
  return block.q + row / block.heads * block.token_stride + row % block.heads * head_dim;
}

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

// The state of attend(): one block of rows against one segment.
struct Attending {
  const QueryBlock& q;
  const KvHead& kv;
  const float* packed;
  Partial part;
  Plan plan;
  Panels panels;
  TileShape shape;
  float* scores;  // [rows][kBlockKeys], turned into probabilities in place
  float* sums;    // [rows][16]
  float* wide_keys;
  float* wide_values;
  ProbCodes* codes;  // [rows], where the wide ones would be
  KeyTile tiles[kBlockKeys / kKeyLanes];
  int64_t key0 = 0;  // first position of the block

  Attending(const QueryBlock& query, const KvHead& head, const float* packed_queries, float* work,
            Partial out)
      : q(query),
        kv(head),
        packed(packed_queries),
        part(out),
        plan(Plan::of(head, query.rows())),
        panels(query.rows(), plan.panel) {
    const int64_t element = cache_element_size(head.type);
    const int64_t stride = Partial::padded(head.head_dim);
    const bool widened = plan.reading == Reading::kWidened;
    shape = {.depth = head.head_dim,
             .stride = stride,
             .value_stride = widened ? stride * int64_t{sizeof(float)} : head.head_dim * element,
             .next_lane = kKeyLanes * element,
             .next_value = head.head_dim * element};
    scores = work;
    sums = scores + query.rows() * kBlockKeys;
    wide_keys = sums + query.rows() * 16;
    wide_values = wide_keys + kBlockKeys * stride;
    codes = reinterpret_cast<ProbCodes*>(wide_keys);
  }
  // What a token sees of the block, as first and end key of it.
  int first_key(int token) const {
    return static_cast<int>(std::clamp<int64_t>(q.first_key(token) - key0, 0, kBlockKeys));
  }
  int end_key(int token) const {
    return static_cast<int>(std::clamp<int64_t>(q.last_key(token) + 1 - key0, 0, kBlockKeys));
  }
};

// Points `tile` at the tile that holds a position.
inline void find_tile(const KvHead& kv, int64_t position, KeyTile& tile) {
  const int64_t page = kv.pages[position / kv.page_size], offset = position % kv.page_size;
  const int64_t at = page * kv.page_bytes + offset * kv.head_dim * cache_element_size(kv.type);
  tile.keys = kv.k + at;
  tile.values = kv.v + at;
  if (kv.type != CacheType::kInt8) return;
  tile.key_scales = kv.k_scale + page * kv.k_scale_page + offset * scale_groups(kv.head_dim);
  tile.value_scales = kv.v_scale + page * kv.v_scale_page + offset;
}

// Finds tiles first..end-1 of the block, and widens them if they are read so.
inline void find_tiles(Attending& a, int first, int end) {
  const KvHead& kv = a.kv;
  const int depth = kv.head_dim;
  const int64_t last = a.q.last_key(a.q.tokens - 1);
  for (int t = first; t < end; ++t) {
    const int64_t position = a.key0 + t * kKeyLanes, next = position + kBlockKeys;
    KeyTile& tile = a.tiles[t];
    find_tile(kv, next <= last ? next : position, tile);
    tile.next_keys = tile.keys;
    tile.next_values = tile.values;
    find_tile(kv, position, tile);
    if (a.plan.reading != Reading::kWidened) continue;
    if (kv.type != CacheType::kF32) {
      float* wide = a.wide_keys + t * kKeyLanes * depth;
      widen(kv.type, tile.keys, depth, kKeyLanes, wide);
      tile.keys = reinterpret_cast<const std::byte*>(wide);
    }
    float* wide = a.wide_values + t * kKeyLanes * a.shape.stride;
    widen(kv.type, tile.values, kKeyLanes, depth, wide);
    tile.values = reinterpret_cast<const std::byte*>(wide);
  }
}

// The row's maximum rises to `max`: what was summed so far shrinks by e^(old - max).
inline void rescale_row(Attending& a, int row, float max) {
  const F32 shrink = f_exp(f_sub(f_set1(a.part.max[row]), f_set1(max)));
  f_store(a.sums + row * 16, f_mul(f_load(a.sums + row * 16), shrink));
  float* out = a.part.out + row * a.shape.stride;
  for (int64_t d = 0; d < a.shape.stride; d += 16) f_store(out + d, f_mul(f_load(out + d), shrink));
  a.part.max[row] = max;
}

// One online softmax step (arXiv:1805.02867) of a row that sees keys first..end-1 of the block.
inline void soften_row(Attending& a, int row, int first, int end) {
  float* scores = a.scores + row * kBlockKeys;
  const int tile0 = first / kKeyLanes, tile_end = (end + kKeyLanes - 1) / kKeyLanes;
  F32 highest = f_set1(kMinusInfinity);
  for (int t = tile0; t < tile_end; ++t) {
    const int at = t * kKeyLanes;
    F32 x = f_load(scores + at);
    const bool partly = first > at || end < at + kKeyLanes, capped = a.q.softcap > 0.0f;
    if (capped) x = f_mul(f_tanh(f_div(x, f_set1(a.q.softcap))), f_set1(a.q.softcap));
    if (partly) x = keep_keys(x, first - at, end - at, kMinusInfinity);
    if (partly || capped) f_store(scores + at, x);
    highest = f_max(x, highest);
  }
  const float peak = f_max_lane(highest);
  if (!(peak <= a.part.max[row])) rescale_row(a, row, peak);
  const F32 max = f_set1(a.part.max[row]);
  F32 sum = f_load(a.sums + row * 16);
  for (int t = tile0; t < tile_end; ++t) {
    const F32 p = f_exp(f_sub(f_load(scores + t * kKeyLanes), max));
    f_store(scores + t * kKeyLanes, p);
    sum = f_add(sum, p);
  }
  f_store(a.sums + row * 16, sum);
  if (a.plan.reading == Reading::kCodes) quantize_probs(scores, a.tiles, first, end, a.codes[row]);
}

// Scores of `rows` rows of a panel that starts at row `first` against tiles tile0..tile_end-1.
inline void score_panel(const Attending& a, int first, int rows, int tile0, int tile_end) {
  float* scores = a.scores + first * kBlockKeys;
  if (a.plan.reading == Reading::kCodes) {
    const int groups = scale_groups(a.kv.head_dim);
    const auto* queries = reinterpret_cast<const QueryCodes*>(a.packed) + first * groups;
    return score_code_rows(rows, queries, a.tiles, tile0, tile_end, a.kv.head_dim, scores);
  }
  const float* packed = a.packed + first * a.kv.head_dim;
  if (a.plan.type == CacheType::kF16)
    return score_rows<CacheType::kF16>(rows, packed, a.tiles, tile0, tile_end, a.shape, scores);
  if (a.plan.type == CacheType::kBf16)
    return score_rows<CacheType::kBf16>(rows, packed, a.tiles, tile0, tile_end, a.shape, scores);
  score_rows<CacheType::kF32>(rows, packed, a.tiles, tile0, tile_end, a.shape, scores);
}

// Adds the values of keys first..end-1 to `rows` rows from `row` on.
inline void add_panel(const Attending& a, int row, int rows, int first, int end) {
  const float* probs = a.scores + row * kBlockKeys;
  float* out = a.part.out + row * a.shape.stride;
  if (a.plan.type == CacheType::kF16)
    return value_rows<CacheType::kF16>(rows, probs, a.tiles, first, end, a.shape, out);
  if (a.plan.type == CacheType::kBf16)
    return value_rows<CacheType::kBf16>(rows, probs, a.tiles, first, end, a.shape, out);
  value_rows<CacheType::kF32>(rows, probs, a.tiles, first, end, a.shape, out);
}

// Adds the block's values to rows first..end-1 of one panel. Keys that all of them see go through
// one register block; those at the edges, which only some tokens see, one by one.
inline void add_values(const Attending& a, int first, int end) {
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

inline void attend_block(Attending& a) {
  const QueryBlock& q = a.q;
  const int64_t after = a.key0 + kBlockKeys - 1 + q.window - q.position;
  const int token0 = static_cast<int>(std::max<int64_t>(0, a.key0 - q.position));
  const int token_end = static_cast<int>(std::min<int64_t>(q.tokens, after));
  if (token0 >= token_end) return;
  const int row0 = token0 * q.heads, row_end = token_end * q.heads;
  const int tile0 = a.first_key(token0) / kKeyLanes;
  const int tile_end = (a.end_key(token_end - 1) + kKeyLanes - 1) / kKeyLanes;
  find_tiles(a, tile0, tile_end);
  const Panels& panels = a.panels;
  for (int p = row0 / panels.size * panels.size; p < row_end; p += panels.size)
    score_panel(a, p, panels.end(p) - p, tile0, tile_end);
  for (int token = token0, row = row0; token < token_end; ++token)
    for (int h = 0; h < q.heads; ++h, ++row)
      soften_row(a, row, a.first_key(token), a.end_key(token));
  for (int p = row0 / panels.size * panels.size; p < row_end; p += panels.size) {
    const int first = std::max(p, row0), end = std::min(panels.end(p), row_end);
    if (a.plan.reading == Reading::kCodes) {
      value_code_rows(end - first, a.codes + first, a.tiles, tile0, tile_end, a.shape,
                      a.part.out + first * a.shape.stride);
    } else {
      add_values(a, first, end);
    }
  }
}

inline void attend_segment(const QueryBlock& block, const KvHead& head, int64_t segment,
                           const float* packed, float* work, Partial out) {
  Attending a(block, head, packed, work, out);
  const int rows = block.rows();
  std::fill(out.max, out.max + rows, kMinusInfinity);
  std::fill(a.sums, a.sums + rows * 16, 0.0f);
  std::fill(out.out, out.out + rows * a.shape.stride, 0.0f);
  const int64_t end = std::min(segment_start(segment + 1), block.last_key(block.tokens - 1) + 1);
  for (a.key0 = segment_start(segment); a.key0 < end; a.key0 += kBlockKeys) attend_block(a);
  for (int r = 0; r < rows; ++r) out.sum[r] = f_sum(f_load(a.sums + r * 16));
}

inline void merge_row(const float* from, float weight_from, float* into, float weight_into,
                      int64_t n) {
  const F32 b = f_set1(weight_from), a = f_set1(weight_into);
  for (int64_t d = 0; d < n; d += 16)
    f_store(into + d, f_fma(f_load(into + d), a, f_mul(f_load(from + d), b)));
}

inline void merge_segment(const QueryBlock& block, int head_dim, int64_t segment, Partial part,
                          Partial into) {
  const int64_t stride = Partial::padded(head_dim);
  for (int r = 0; r < block.rows(); ++r) {
    const int token = r / block.heads;
    const int64_t first = segment_of(block.first_key(token));
    if (segment < first || segment > segment_of(block.last_key(token))) continue;
    const float* from = part.out + r * stride;
    float* to = into.out + r * stride;
    if (segment == first) {
      into.max[r] = part.max[r];
      into.sum[r] = part.sum[r];
      std::memcpy(to, from, static_cast<size_t>(stride) * sizeof(float));
      continue;
    }
    const float max = part.max[r] <= into.max[r] ? into.max[r] : part.max[r];
    float weights[16] = {into.max[r] - max, part.max[r] - max};
    f_store(weights, f_exp(f_load(weights)));
    into.max[r] = max;
    into.sum[r] = into.sum[r] * weights[0] + part.sum[r] * weights[1];
    merge_row(from, weights[1], to, weights[0], stride);
  }
}

inline void join_sink(float sink, Partial part, int row, int64_t stride) {
  const float max = sink <= part.max[row] ? part.max[row] : sink;
  float weights[16] = {part.max[row] - max, sink - max};
  f_store(weights, f_exp(f_load(weights)));
  const F32 weight = f_set1(weights[0]);
  float* out = part.out + row * stride;
  for (int64_t d = 0; d < stride; d += 16) f_store(out + d, f_mul(f_load(out + d), weight));
  part.max[row] = max;
  part.sum[row] = part.sum[row] * weights[0] + weights[1];
}

inline void finish_rows(const QueryBlock& block, int head_dim, Partial part) {
  const int64_t stride = Partial::padded(head_dim);
  for (int r = 0; r < block.rows(); ++r) {
    const int token = r / block.heads, head = r % block.heads;
    const float* from = part.out + r * stride;
    float* to = block.out + token * block.token_stride + head * head_dim;
    if (block.sinks != nullptr) join_sink(block.sinks[head], part, r, stride);
    const F32 sum = f_set1(part.sum[r]);
    int d = 0;
    for (; d + 16 <= head_dim; d += 16) f_store(to + d, f_div(f_load(from + d), sum));
    if (d < head_dim) f_store_n(to + d, head_dim - d, f_div(f_load(from + d), sum));
  }
}

constexpr AttentionKernels make_attention_kernels() {
  AttentionKernels k{};
  k.pack_queries = pack_queries;
  k.attend = attend_segment;
  k.merge = merge_segment;
  k.finish = finish_rows;
  k.store = store_position;
  return k;
}

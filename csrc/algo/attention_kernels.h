// Attention kernels over the 16-lane names of simd/. Included in the anonymous namespace of each
// ISA.
#pragma once

#include "algo/attention_blocks.h"
#include "algo/math.h"

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Rows are cut into panels of one register block, as equal as they come.
struct Panels {
  explicit Panels(int rows) : rows_(rows) {
    const int count = (rows + kFloatRows - 1) / kFloatRows;
    size = (rows + count - 1) / count;
  }
  int end(int first) const { return std::min(rows_, first + size); }

  int size;

 private:
  int rows_;
};

// packed: panels one after the other, each [head_dim][rows of the panel].
inline void pack_queries(const QueryBlock& block, int head_dim, float* packed) {
  const Panels panels(block.rows());
  for (int first = 0; first < block.rows(); first += panels.size) {
    const int rows = panels.end(first) - first;
    for (int r = 0; r < rows; ++r) {
      const int token = (first + r) / block.heads, head = (first + r) % block.heads;
      const float* q = block.q + token * block.token_stride + head * head_dim;
      for (int d = 0; d < head_dim; ++d) packed[d * rows + r] = q[d] * block.scale;
    }
    packed += rows * head_dim;
  }
}

inline F32 load_cached(CacheType type, const std::byte* p) {
  if (type == CacheType::kF16) return f_load_f16(reinterpret_cast<const uint16_t*>(p));
  if (type == CacheType::kBf16) return f_load_bf16(reinterpret_cast<const uint16_t*>(p));
  return f_load(reinterpret_cast<const float*>(p));
}

inline float load_cached_one(CacheType type, const std::byte* p) {
  if (type == CacheType::kF32) return *reinterpret_cast<const float*>(p);
  const uint16_t half = *reinterpret_cast<const uint16_t*>(p);
  return type == CacheType::kF16 ? f16_to_f32(half) : bf16_to_f32(half);
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
  TileShape shape;
  float* scores;  // [rows][kBlockKeys], turned into probabilities in place
  float* sums;    // [rows][16]
  float* wide_keys;
  float* wide_values;
  KeyTile tiles[kBlockKeys / kKeyLanes];
  int64_t key0 = 0;  // first position of the block

  Attending(const QueryBlock& query, const KvHead& head, const float* packed_queries, float* work,
            Partial out)
      : q(query), kv(head), packed(packed_queries), part(out) {
    const int64_t element = cache_element_size(head.type);
    shape = {.depth = head.head_dim,
             .stride = Partial::padded(head.head_dim),
             .next_lane = kKeyLanes * element,
             .next_value = head.head_dim * element};
    scores = work;
    sums = scores + query.rows() * kBlockKeys;
    wide_keys = sums + query.rows() * 16;
    wide_values = wide_keys + kBlockKeys * shape.stride;
  }
  // What a token sees of the block, as first and end key of it.
  int first_key(int token) const {
    return static_cast<int>(std::clamp<int64_t>(q.first_key(token) - key0, 0, kBlockKeys));
  }
  int end_key(int token) const {
    return static_cast<int>(std::clamp<int64_t>(q.last_key(token) + 1 - key0, 0, kBlockKeys));
  }
};

// Bytes from page 0 to the tile that holds a position, in k and in v.
inline int64_t tile_offset(const KvHead& kv, int64_t position) {
  const int64_t in_page = (position % kv.page_size) * kv.head_dim * cache_element_size(kv.type);
  return kv.pages[position / kv.page_size] * kv.page_bytes + in_page;
}

// Finds tiles first..end-1 of the block, in place where the cache holds what the products read.
inline void find_tiles(Attending& a, int first, int end) {
  const KvHead& kv = a.kv;
  const int depth = kv.head_dim;
  const int64_t last = a.q.last_key(a.q.tokens - 1);
  for (int t = first; t < end; ++t) {
    const int64_t position = a.key0 + t * kKeyLanes, next = position + kBlockKeys;
    const int64_t offset = tile_offset(kv, position);
    const int64_t next_offset = next <= last ? tile_offset(kv, next) : offset;
    const std::byte *k = kv.k + offset, *v = kv.v + offset;
    a.tiles[t] = {.keys = reinterpret_cast<const float*>(k),
                  .values = reinterpret_cast<const float*>(v),
                  .next_keys = kv.k + next_offset,
                  .next_values = kv.v + next_offset};
    if (kv.type != CacheType::kF32) {
      float* wide = a.wide_keys + t * kKeyLanes * depth;
      widen(kv.type, k, depth, kKeyLanes, wide);
      a.tiles[t].keys = wide;
    }
    if (kv.type != CacheType::kF32 || a.shape.stride != depth) {
      float* wide = a.wide_values + t * kKeyLanes * a.shape.stride;
      widen(kv.type, v, kKeyLanes, depth, wide);
      a.tiles[t].values = wide;
    }
  }
}

// Keeps lanes first..end-1, -inf elsewhere.
inline F32 keep_keys(F32 x, int first, int end) {
  static constexpr float kIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const F32 index = f_load(kIndex), hidden = f_set1(kMinusInfinity);
  x = f_select_lt(index, f_set1(static_cast<float>(end)), x, hidden);
  return f_select_lt(index, f_set1(static_cast<float>(first)), hidden, x);
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
    if (first > at || end < at + kKeyLanes) {
      x = keep_keys(x, first - at, end - at);
      f_store(scores + at, x);
    }
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
    value_rows(row_end - row, a.scores + row * kBlockKeys, a.tiles, key, key_end, a.shape,
               a.part.out + row * a.shape.stride);
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
  const Panels panels(q.rows());
  for (int p = row0 / panels.size * panels.size; p < row_end; p += panels.size)
    score_rows(panels.end(p) - p, a.packed + p * a.kv.head_dim, a.tiles, tile0, tile_end, a.shape,
               a.scores + p * kBlockKeys);
  for (int token = token0, row = row0; token < token_end; ++token)
    for (int h = 0; h < q.heads; ++h, ++row)
      soften_row(a, row, a.first_key(token), a.end_key(token));
  for (int p = row0 / panels.size * panels.size; p < row_end; p += panels.size)
    add_values(a, std::max(p, row0), std::min(panels.end(p), row_end));
}

inline void attend_segment(const QueryBlock& block, const KvHead& head, int64_t segment,
                           const float* packed, float* work, Partial out) {
  Attending a(block, head, packed, work, out);
  const int rows = block.rows();
  std::fill(out.max, out.max + rows, kMinusInfinity);
  std::fill(a.sums, a.sums + rows * 16, 0.0f);
  std::fill(out.out, out.out + rows * a.shape.stride, 0.0f);
  const int64_t end = std::min<int64_t>((segment + 1) * kSegmentKeys,  //
                                        block.last_key(block.tokens - 1) + 1);
  for (a.key0 = segment * kSegmentKeys; a.key0 < end; a.key0 += kBlockKeys) attend_block(a);
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
    const int64_t first = block.first_key(token) / kSegmentKeys;
    if (segment < first || segment > block.last_key(token) / kSegmentKeys) continue;
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

// x [n] narrowed to the cache's type, in memory for n rounded up to 16.
inline void narrow(CacheType type, const float* x, int n, std::byte* to) {
  const int64_t size = cache_element_size(type);
  for (int i = 0; i < n; i += 16) {
    const F32 v = n - i >= 16 ? f_load(x + i) : f_load_n(x + i, n - i);
    std::byte* p = to + i * size;
    if (type == CacheType::kF32) f_store(reinterpret_cast<float*>(p), v);
    if (type == CacheType::kF16) f_store_f16(reinterpret_cast<uint16_t*>(p), v);
    if (type == CacheType::kBf16) f_store_bf16(reinterpret_cast<uint16_t*>(p), v);
  }
}

template <class T>
inline void spread(const std::byte* from, int n, std::byte* to) {
  const T* x = reinterpret_cast<const T*>(from);
  T* lane = reinterpret_cast<T*>(to);
  for (int i = 0; i < n; ++i) lane[i * kKeyLanes] = x[i];
}

inline void store_position(const KvHead& head, int64_t position, const float* k, const float* v) {
  alignas(64) std::byte narrowed[kMaxHeadDim * sizeof(float)];
  const int n = head.head_dim;
  const int64_t size = cache_element_size(head.type), offset = position % head.page_size;
  const int64_t page = head.pages[position / head.page_size] * head.page_bytes;
  narrow(head.type, k, n, narrowed);
  const int64_t tile = offset / kKeyLanes * kKeyLanes * n;
  std::byte* lane = head.k + page + (tile + offset % kKeyLanes) * size;
  if (head.type == CacheType::kF32) {
    spread<float>(narrowed, n, lane);
  } else {
    spread<uint16_t>(narrowed, n, lane);
  }
  narrow(head.type, v, n, narrowed);
  std::memcpy(head.v + page + offset * n * size, narrowed, static_cast<size_t>(n * size));
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

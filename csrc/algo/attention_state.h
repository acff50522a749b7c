// Where attention over one segment stands: the block of keys at hand, its tiles, and the online
// softmax. What the products multiply, and how, is up to those of attention_products.h and
// attention_pairs.h. Included in the anonymous namespace of each ISA.
#pragma once

#include "algo/attention_blocks.h"
#include "algo/math.h"

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr int kTiles = kBlockKeys / kKeyLanes;

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

// The state of attend(): one block of rows against one segment.
struct Attending {
  const QueryBlock& q;
  const KvHead& kv;
  const float* packed;
  Partial part;
  TileShape shape;
  float* scores;  // [rows][kBlockKeys], turned into probabilities in place
  float* sums;    // [rows][16]
  float* extra;   // for the products: see attention_work_floats()
  KeyTile tiles[kTiles];
  int64_t key0 = 0;  // first position of the block

  Attending(const QueryBlock& query, const KvHead& head, const float* packed_queries, float* work,
            Partial out)
      : q(query), kv(head), packed(packed_queries), part(out) {
    const int64_t element = cache_element_size(head.type);
    shape = {.depth = head.head_dim,
             .stride = Partial::padded(head.head_dim),
             .value_stride = head.head_dim * element,
             .next_lane = kKeyLanes * element,
             .next_value = head.head_dim * element};
    scores = work;
    sums = scores + query.rows() * kBlockKeys;
    extra = sums + query.rows() * 16;
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

// Finds tiles first..end-1 of the block in the cache.
inline void find_tiles(Attending& a, int first, int end) {
  const int64_t last = a.q.last_key(a.q.tokens - 1);
  for (int t = first; t < end; ++t) {
    const int64_t position = a.key0 + t * kKeyLanes, next = position + kBlockKeys;
    KeyTile& tile = a.tiles[t];
    find_tile(a.kv, next <= last ? next : position, tile);
    tile.next_keys = tile.keys;
    tile.next_values = tile.values;
    find_tile(a.kv, position, tile);
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

// One online softmax step (arXiv:1805.02867) of a row that sees keys first..end-1 of the block:
// caps its scores, hides those that it does not see, and raises its maximum. The steps of a row are
// long chains, so each is done for all rows before the next: the processor then works on several.
[[gnu::flatten]] inline void raise_max(Attending& a, int row, int first, int end) {
  float* scores = a.scores + row * kBlockKeys;
  F32 x[kTiles];
#pragma GCC unroll 4
  for (int t = 0; t < kTiles; ++t) x[t] = f_load(scores + t * kKeyLanes);
  if (a.q.softcap > 0.0f) {
    const F32 cap = f_set1(a.q.softcap);
    for (F32& v : x) v = f_mul(f_tanh(f_div(v, cap)), cap);
  }
  if (first > 0 || end < kBlockKeys) {
    for (int t = 0; t < kTiles; ++t)
      x[t] = keep_keys(x[t], first - t * kKeyLanes, end - t * kKeyLanes, kMinusInfinity);
  }
  if (first > 0 || end < kBlockKeys || a.q.softcap > 0.0f) {
    for (int t = 0; t < kTiles; ++t) f_store(scores + t * kKeyLanes, x[t]);
  }
  F32 highest = f_max(x[0], f_set1(kMinusInfinity));
#pragma GCC unroll 4
  for (int t = 1; t < kTiles; ++t) highest = f_max(x[t], highest);
  const float peak = f_max_lane(highest);
  if (!(peak <= a.part.max[row])) rescale_row(a, row, peak);
}

// The probabilities of the row against its maximum so far, zero where it does not see.
[[gnu::flatten]] inline void exponentials(const Attending& a, int row, F32 (&probs)[kTiles]) {
  const float* scores = a.scores + row * kBlockKeys;
  const F32 max = f_set1(a.part.max[row]);
#pragma GCC unroll 4
  for (int t = 0; t < kTiles; ++t) probs[t] = f_exp(f_sub(f_load(scores + t * kKeyLanes), max));
}

// Adds probabilities to the row's sum.
inline void add_sum(Attending& a, int row, const F32 (&probs)[kTiles]) {
  F32 sum = f_load(a.sums + row * 16);
#pragma GCC unroll 4
  for (int t = 0; t < kTiles; ++t) sum = f_add(sum, probs[t]);
  f_store(a.sums + row * 16, sum);
}

// All of one block. `products` has
//   panel(): most rows that one of its register blocks takes
//   load(a, first, end): what it needs of tiles first..end-1 before any product
//   score(a, row, rows, tile0, tile_end): the scores of some rows of one panel
//   soften(a, row, first, end): a row's probabilities, their sum, and what add() needs of them
//   settle(a, row, row_end): what is left to do for it
//   add(a, row, row_end, tile0, tile_end): the block's values, to rows of one panel
template <class Products>
inline void attend_block(Attending& a, const Products& products) {
  const QueryBlock& q = a.q;
  const int64_t after = a.key0 + kBlockKeys - 1 + q.window - q.position;
  const int token0 = static_cast<int>(std::max<int64_t>(0, a.key0 - q.position));
  const int token_end = static_cast<int>(std::min<int64_t>(q.tokens, after));
  if (token0 >= token_end) return;
  const int row0 = token0 * q.heads, row_end = token_end * q.heads;
  const int tile0 = a.first_key(token0) / kKeyLanes;
  const int tile_end = (a.end_key(token_end - 1) + kKeyLanes - 1) / kKeyLanes;
  find_tiles(a, tile0, tile_end);
  products.load(a, tile0, tile_end);
  const Panels panels(q.rows(), products.panel());
  for (int p = row0 / panels.size * panels.size; p < row_end; p += panels.size)
    products.score(a, p, panels.end(p) - p, tile0, tile_end);
  for (int token = token0, row = row0; token < token_end; ++token)
    for (int h = 0; h < q.heads; ++h, ++row)
      raise_max(a, row, a.first_key(token), a.end_key(token));
  for (int token = token0, row = row0; token < token_end; ++token)
    for (int h = 0; h < q.heads; ++h, ++row)
      products.soften(a, row, a.first_key(token), a.end_key(token));
  products.settle(a, row0, row_end);
  for (int p = row0 / panels.size * panels.size; p < row_end; p += panels.size)
    products.add(a, std::max(p, row0), std::min(panels.end(p), row_end), tile0, tile_end);
}

template <class Products>
inline void attend_segment(const Products& products, const QueryBlock& block, const KvHead& head,
                           int64_t segment, const float* packed, float* work, Partial out) {
  Attending a(block, head, packed, work, out);
  const int rows = block.rows();
  std::fill(out.max, out.max + rows, kMinusInfinity);
  std::fill(a.sums, a.sums + rows * 16, 0.0f);
  std::fill(out.out, out.out + rows * a.shape.stride, 0.0f);
  const int64_t end = std::min(segment_start(segment + 1), block.last_key(block.tokens - 1) + 1);
  for (a.key0 = segment_start(segment); a.key0 < end; a.key0 += kBlockKeys)
    attend_block(a, products);
  for (int r = 0; r < rows; ++r) out.sum[r] = f_sum(f_load(a.sums + r * 16));
}

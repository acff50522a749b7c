// Leaf kernels of attention over the paged cache.
//
// The arithmetic of one query row depends on its position alone. Keys are taken in blocks of
// kBlockKeys counted from position 0: scores are fma chains over head_dim, one online softmax step
// per block, values are added in ascending position. kSegmentKeys keys make a segment, which starts
// afresh (maximum -inf, sum 0) and is merged into the segments before it by one formula. So the
// bits of a row are the same however rows are batched, chunked and spread over threads, and on
// every ISA. A key that a row does not see never meets it, not even multiplied by zero: what lies
// in the cache beyond the row's position may be anything.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace moestro {

enum class CacheType { kF32, kF16, kBf16 };

constexpr int64_t cache_element_size(CacheType type) { return type == CacheType::kF32 ? 4 : 2; }

constexpr int kKeyLanes = 16;      // keys side by side in a K tile
constexpr int kBlockKeys = 64;     // keys per online softmax step
constexpr int kSegmentKeys = 512;  // keys per independently computed part
constexpr int kQueryRows = 96;     // most query rows that share a walk over the keys
constexpr int kMaxHeadDim = 256;
constexpr int64_t kNoWindow = int64_t{1} << 40;

// One sequence's cache of one kv head.
struct KvHead {
  std::byte* k;          // of page 0: [page_size / 16][head_dim][16]
  std::byte* v;          // of page 0: [page_size][head_dim]
  int64_t page_bytes;    // from one page to the next, in k and in v
  const int32_t* pages;  // of the sequence
  int64_t page_size;
  int head_dim;
  CacheType type;
};

// Consecutive tokens of one sequence x the query heads of one kv head; row = token * heads + head.
struct QueryBlock {
  const float* q;      // first token, first head; heads are adjacent
  float* out;          // likewise
  const float* sinks;  // one per head, or null
  int64_t token_stride;
  int64_t position;  // of the first token
  int64_t window;    // keys a token sees at most, kNoWindow for all
  int tokens;
  int heads;
  float scale;

  int rows() const { return tokens * heads; }
  int64_t last_key(int64_t token) const { return position + token; }
  int64_t first_key(int64_t token) const {
    return std::max<int64_t>(0, position + token - window + 1);
  }
  int64_t first_segment() const { return first_key(0) / kSegmentKeys; }
  int64_t end_segment() const { return last_key(tokens - 1) / kSegmentKeys + 1; }
};

// Unnormalized attention of the rows over some keys: running maximum [rows], sum of exponentials
// [rows], weighted values [rows][padded head_dim].
struct Partial {
  float* max;
  float* sum;
  float* out;

  static int64_t floats(int rows, int head_dim) {
    return 2 * padded(rows) + rows * padded(head_dim);
  }
  static Partial at(float* memory, int rows) {
    return {memory, memory + padded(rows), memory + 2 * padded(rows)};
  }
  static int64_t padded(int64_t n) { return (n + 15) & ~int64_t{15}; }
};

struct AttentionKernels {
  // Lays the scaled queries out for attend().
  void (*pack_queries)(const QueryBlock& block, int head_dim, float* packed);
  // Attention over one segment. packed: from pack_queries; work: attention_work_floats().
  void (*attend)(const QueryBlock& block, const KvHead& head, int64_t segment, const float* packed,
                 float* work, Partial out);
  // Joins one segment to those before it, for the rows that see it; segments ascending.
  void (*merge)(const QueryBlock& block, int head_dim, int64_t segment, Partial part, Partial into);
  // block.out = part.out / part.sum, where a head's sink joins the sum as the score of one more key
  // that has no value.
  void (*finish)(const QueryBlock& block, int head_dim, Partial part);
  // Stores k [head_dim] and v [head_dim] of one position.
  void (*store)(const KvHead& head, int64_t position, const float* k, const float* v);
};

// Floats of the scratch that attend() works in: scores, sums by lane, widened keys and values.
inline int64_t attention_work_floats(int rows, int head_dim) {
  return int64_t{rows} * (kBlockKeys + 16) + 2 * kBlockKeys * Partial::padded(head_dim);
}

}  // namespace moestro

// Leaf kernels of attention over the paged cache.
//
// The arithmetic of one query row depends on its position alone. Keys are taken in blocks of
// kBlockKeys counted from position 0: scores are fma chains over head_dim, one online softmax step
// per block, values are added in ascending position. Segments of keys, cut at fixed positions,
// start afresh (maximum -inf, sum 0) and are merged into the segments before them by one formula.
// So the bits of a row are the same however rows are batched, chunked and spread over threads, and
// on every ISA. A key that a row does not see never meets it, not even multiplied by zero: what
// lies in the cache beyond the row's position may be anything.
//
// Caches of signed bytes (kInt8) hold code + 128, so that codes meet signed query and probability
// digits in the exact integer dot of micro/. Keys have one scale per 32 channels, values one per
// position and head, both bfloat16, rounded up from amax / 127 so that |code| <= 127. Queries
// become bytes in the same way; a block's probabilities times value scales become two digits of
// seven bits relative to the row's largest. Integer sums are exact, float steps have one order:
// same bits everywhere again. Errors, with a = amax of the 32 channels or of the value: a key or
// query element a / 252 at most, a value element likewise, a probability 2^-15 of the block's
// largest.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace moestro {

enum class CacheType { kF32, kF16, kBf16, kInt8 };

constexpr int64_t cache_element_size(CacheType type) {
  return type == CacheType::kF32 ? 4 : type == CacheType::kInt8 ? 1 : 2;
}

constexpr int kKeyLanes = 16;   // keys side by side in a K tile
constexpr int kBlockKeys = 64;  // keys per online softmax step
constexpr int kScaleKeys = 32;  // channels of a key or query that share a scale
constexpr int kQueryRows = 96;  // most query rows that share a walk over the keys
constexpr int kMaxHeadDim = 256;
constexpr int64_t kNoWindow = int64_t{1} << 40;

// Segments: short ones where contexts are mostly short, so that all threads have work; longer ones
// behind kLongFrom, where there are enough anyway.
constexpr int64_t kSegmentKeys = 256;
constexpr int64_t kLongSegmentKeys = 1024;
constexpr int64_t kLongFrom = 8192;
constexpr int64_t segment_of(int64_t position) {
  return position < kLongFrom
             ? position / kSegmentKeys
             : kLongFrom / kSegmentKeys + (position - kLongFrom) / kLongSegmentKeys;
}
constexpr int64_t segment_start(int64_t segment) {
  constexpr int64_t kShort = kLongFrom / kSegmentKeys;
  return segment < kShort ? segment * kSegmentKeys
                          : kLongFrom + (segment - kShort) * kLongSegmentKeys;
}

constexpr int scale_groups(int head_dim) { return (head_dim + kScaleKeys - 1) / kScaleKeys; }

// One sequence's cache of one kv head.
struct KvHead {
  // Of page 0. Numbers: k [page_size / 16][head_dim][16], v [page_size][head_dim].
  // Bytes: k [page_size / 16][head_dim / 4][16][4], v [page_size / 4][head_dim][4].
  std::byte* k;
  std::byte* v;
  uint16_t* k_scale;     // of page 0: [page_size / 16][scale_groups][16], null unless kInt8
  uint16_t* v_scale;     // of page 0: [page_size]
  int64_t page_bytes;    // from one page to the next, in k and in v
  int64_t k_scale_page;  // likewise in k_scale
  int64_t v_scale_page;  // and in v_scale
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
  float softcap;  // scores become softcap * tanh(score / softcap); 0: as they are

  int rows() const { return tokens * heads; }
  int64_t last_key(int64_t token) const { return position + token; }
  int64_t first_key(int64_t token) const {
    return std::max<int64_t>(0, position + token - window + 1);
  }
  int64_t first_segment() const { return segment_of(first_key(0)); }
  int64_t end_segment() const { return segment_of(last_key(tokens - 1)) + 1; }
};

// Unnormalized attention of the rows over some keys: running maximum [rows], sum of exponentials
// [rows], weighted values [rows][padded head_dim].
struct Partial {
  float* max;
  float* sum;
  float* out;

  static constexpr int64_t floats(int rows, int head_dim) {
    return 2 * padded(rows) + rows * padded(head_dim);
  }
  static Partial at(float* memory, int rows) {
    return {memory, memory + padded(rows), memory + 2 * padded(rows)};
  }
  static constexpr int64_t padded(int64_t n) { return (n + 15) & ~int64_t{15}; }
};

struct AttentionKernels {
  // Lays the scaled queries out for attend(), in attention_packed_floats().
  void (*pack_queries)(const QueryBlock& block, const KvHead& head, float* packed);
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

constexpr int kQueryCodeFloats = 10;  // kScaleKeys channels of a query in codes
constexpr int kProbCodeFloats = 34;   // a row's probabilities of a block in codes

// Floats of the packed queries.
constexpr int64_t attention_packed_floats(int rows, int head_dim) {
  return int64_t{rows} * std::max(head_dim, kQueryCodeFloats * scale_groups(head_dim));
}

// Floats of the scratch that attend() works in: scores, sums by lane, widened keys and values or
// probabilities in codes.
constexpr int64_t attention_work_floats(int rows, int head_dim) {
  return int64_t{rows} * (kBlockKeys + 16) +
         std::max<int64_t>(2 * kBlockKeys * Partial::padded(head_dim), rows * kProbCodeFloats);
}

}  // namespace moestro

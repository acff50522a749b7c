// Leaf kernels of multi-head latent attention (arXiv:2405.04434) in its absorbed form: all query
// heads of a token attend to one compressed row per position, which is key and value at once.
//
// Sixteen query heads lie side by side, one vector lane each; keys are broadcast. As in
// isa/attention_kernels.h the arithmetic of one head of one token depends on its position alone:
// blocks of kBlockKeys keys from position 0 on, one online softmax step each, segments cut at fixed
// positions that start afresh and are merged in ascending order by one formula. Every sum
// is a chain in ascending channel or position, so the bits are the same however tokens are
// batched, chunked and spread over threads, and on every ISA.
#pragma once

#include "isa/attention_kernels.h"

namespace moestro {

constexpr int kHeadLanes = 16;       // query heads side by side
constexpr int kMaxLatentRank = 512;  // compressed channels
constexpr int kMaxLatentRope = 128;  // rotated channels beside them
constexpr int kMaxLatentWidth = kMaxLatentRank + kMaxLatentRope;
constexpr int kLatentTokens = 6;  // most tokens that share a walk over the keys

// One sequence's cache: rows of rank compressed channels, then rotated ones.
struct LatentCache {
  std::byte* data;       // of page 0: [page_size][width]
  int64_t page_bytes;    // from one page to the next
  const int32_t* pages;  // of the sequence
  int64_t page_size;
  int width;
  int rank;
  CacheType type;

  int stride() const { return (width + 15) & ~15; }  // floats of a widened row
  std::byte* row(int64_t position) const {
    return data + pages[position / page_size] * page_bytes +
           position % page_size * width * cache_element_size(type);
  }
};

// What is stored of one token.
struct LatentRow {
  const float* kv;    // [width]
  const float* norm;  // [rank]: weights of the compressed channels' norm
  const float* cos;   // [(width - rank) / 2] at the token's position
  const float* sin;
  float eps;
  bool interleaved;
};

// Consecutive tokens of one sequence x up to sixteen heads. Row = token * kHeadLanes + head.
struct LatentQueries {
  const float* absorbed;   // [heads][rank] of the first token, against the compressed channels
  const float* rotated;    // of the first token and head, against the rotated channels
  float* out;              // [heads][rank] of the first token
  int64_t absorbed_token;  // floats from token to token, in absorbed and out
  int64_t rotated_token;
  int64_t rotated_head;
  int64_t position;  // of the first token
  int tokens;
  int heads;
  float scale;

  int rows() const { return tokens * kHeadLanes; }
  int64_t last_key(int64_t token) const { return position + token; }
  int64_t segments() const { return segment_of(last_key(tokens - 1)) + 1; }
};

// Unnormalized attention of the rows over some keys: running maximum [rows], sum of exponentials
// [rows], weighted keys [rows][padded rank].
struct LatentPartial {
  float* max;
  float* sum;
  float* out;

  static int64_t stride(int64_t rank) { return (rank + 15) & ~int64_t{15}; }
  static int64_t floats(int tokens, int64_t rank) {
    return int64_t{tokens} * kHeadLanes * (2 + stride(rank));
  }
  static LatentPartial at(float* memory, int tokens) {
    return {memory, memory + tokens * kHeadLanes, memory + 2 * tokens * kHeadLanes};
  }
};

struct LatentKernels {
  // Norms, rotates and stores one position.
  void (*store)(const LatentCache& cache, int64_t position, const LatentRow& row);
  // Lays the scaled queries out for attend(): [width][tokens][kHeadLanes], zero in missing heads.
  void (*pack)(const LatentQueries& queries, const LatentCache& cache, float* packed);
  // Attention over one segment. work: latent_work_floats().
  void (*attend)(const LatentQueries& queries, const LatentCache& cache, int64_t segment,
                 const float* packed, float* work, LatentPartial out);
  // Joins one segment to those before it, for the tokens that see it; segments ascending.
  void (*merge)(const LatentQueries& queries, int rank, int64_t segment, LatentPartial part,
                LatentPartial into);
  // queries.out = part.out / part.sum
  void (*finish)(const LatentQueries& queries, int rank, LatentPartial part);
};

// Floats of the scratch that attend() works in: scores and widened keys.
constexpr int64_t latent_work_floats(int tokens, int64_t stride) {
  return kBlockKeys * (int64_t{tokens} * kHeadLanes + stride);
}

}  // namespace moestro

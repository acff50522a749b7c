// Multi-head latent attention (arXiv:2405.04434) over the paged cache of compressed rows: the op
// that stores a step's rows, and the absorbed attention for any mix of prefill and decode.
#pragma once

#include <memory>

#include "algo/kv_cache.h"
#include "isa/latent_kernels.h"

namespace moestro {

// One layer's cache: [pages, page_size, rank + rope].
struct PagedLatent {
  std::byte* data;
  CacheType type;
  int64_t pages;
  int64_t page_size;
  int64_t width;
  int64_t rank;

  operator Paging() const { return {pages, page_size}; }
  LatentCache of(const int32_t* pages_of_slot) const {
    return {.data = data,
            .page_bytes = page_size * width * cache_element_size(type),
            .pages = pages_of_slot,
            .page_size = page_size,
            .width = static_cast<int>(width),
            .rank = static_cast<int>(rank),
            .type = type};
  }
};

struct WriteLatentArgs {
  const float* kv;    // [T, rank + rope]
  const float* norm;  // [rank]
  const float* cos;   // [max_positions, rope / 2]
  const float* sin;
  int64_t max_positions;
  PagedLatent cache;
  RaggedBatch batch;
  float eps;
  bool interleaved;
};
std::unique_ptr<Op> make_write_latent(const WriteLatentArgs& args, Rows rows);

struct LatentAttentionArgs {
  const float* q;         // [T, heads * q_width], whose last rope channels of each head are read
  const float* absorbed;  // [T, heads * rank]
  float* out;             // likewise; may be absorbed
  PagedLatent cache;
  RaggedBatch batch;
  int64_t heads;
  int64_t q_width;
  float scale;
};
std::unique_ptr<Op> make_latent_attention(const LatentAttentionArgs& args, Rows rows);

}  // namespace moestro

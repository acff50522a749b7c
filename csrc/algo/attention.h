// Causal grouped-query attention over the paged cache, for any mix of prefill and decode.
#pragma once

#include <memory>

#include "algo/kv_cache.h"

namespace moestro {

struct AttentionArgs {
  const float* q;  // [T, heads * head_dim]
  float* out;      // [T, heads * head_dim]
  PagedCache cache;
  RaggedBatch batch;
  const float* sinks;  // [heads] or null
  int64_t heads;
  float scale;
  int64_t window;  // kNoWindow for all keys
  float softcap;   // 0 for none
};

std::unique_ptr<Op> make_attention(const AttentionArgs& args, Rows rows);

}  // namespace moestro

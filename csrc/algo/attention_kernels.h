// The kernel table of attention: one segment, the join of segments, and the cache's stores.
// Included in the anonymous namespace of each ISA.
#pragma once

#include "algo/attention_products.h"
#include "algo/attention_store.h"

inline void attend(const QueryBlock& block, const KvHead& head, int64_t segment,
                   const float* packed, float* work, Partial out) {
  attend_segment(Products(block, head), block, head, segment, packed, work, out);
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
  k.attend = attend;
  k.merge = merge_segment;
  k.finish = finish_rows;
  k.store = store_position;
  return k;
}

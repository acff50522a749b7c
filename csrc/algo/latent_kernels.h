// Kernels of multi-head latent attention over the 16-lane names of simd/. Included in the anonymous
// namespace of each ISA.
#pragma once

#include "algo/attention_kernels.h"
#include "algo/float_kernels.h"

// Register blocks: keys x token vectors of scores, heads x channel vectors of outputs.
constexpr bool kWideLatent = kFloatAccumulators >= 16;
constexpr int kScoreTokens = kWideLatent ? 2 : 1;
constexpr int kScoreKeys = kWideLatent ? 8 : 4;    // with kScoreTokens
constexpr int kSingleKeys = kWideLatent ? 16 : 4;  // with one
constexpr int kOutputHeads = kWideLatent ? 8 : 4;
constexpr int kOutputVectors = kWideLatent ? 2 : 1;

inline void store_latent(const LatentCache& cache, int64_t position, const LatentRow& row) {
  alignas(64) float x[kMaxLatentWidth + 16];
  alignas(64) std::byte narrowed[(kMaxLatentWidth + 16) * sizeof(float)];
  const int rope = cache.width - cache.rank;
  rmsnorm_row(row.kv, row.norm, x, cache.rank, row.eps);
  for (int i = 0; i < rope; ++i) x[cache.rank + i] = row.kv[cache.rank + i];
  rope_head(x + cache.rank, row.cos, row.sin, rope / 2, row.interleaved);
  narrow(cache.type, x, cache.width, narrowed);
  std::memcpy(cache.row(position), narrowed,
              static_cast<size_t>(cache.width * cache_element_size(cache.type)));
}

inline void pack_latent(const LatentQueries& q, const LatentCache& cache, float* packed) {
  const int rows = q.rows();
  for (int64_t i = 0; i < int64_t{cache.width} * rows; i += 16) f_store(packed + i, f_zero());
  for (int t = 0; t < q.tokens; ++t) {
    for (int h = 0; h < q.heads; ++h) {
      const float* a = q.absorbed + t * q.absorbed_token + h * cache.rank;
      const float* r = q.rotated + t * q.rotated_token + h * q.rotated_head;
      float* to = packed + t * kHeadLanes + h;
      for (int d = 0; d < cache.rank; ++d, to += rows) *to = a[d] * q.scale;
      for (int d = 0; d < cache.width - cache.rank; ++d, to += rows) *to = r[d] * q.scale;
    }
  }
}

// scores[k * rows + 16 * c + lane] = sum over d of keys[k][d] * packed[d][c][lane]
template <int K, int C>
[[gnu::noinline]] void latent_score_block(const float* packed, int rows, const float* keys,
                                          int stride, int width, float* scores) {
  F32 acc[K][C];
#pragma GCC unroll 16
  for (int k = 0; k < K; ++k) {
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) acc[k][c] = f_zero();
  }
  for (int d = 0; d < width; ++d, packed += rows) {
    F32 q[C];
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) q[c] = f_load(packed + c * kHeadLanes);
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) {
      const F32 key = f_set1(keys[k * stride + d]);
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) acc[k][c] = f_fma(key, q[c], acc[k][c]);
    }
  }
#pragma GCC unroll 16
  for (int k = 0; k < K; ++k) {
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) f_store(scores + k * rows + c * kHeadLanes, acc[k][c]);
  }
}

// out[h][16 * c + lane] += sum over keys, ascending, of probs[key * rows + h] * keys[key][16 * c +
// lane]
template <int H, int C>
[[gnu::noinline]] void latent_value_block(const float* probs, int rows, const float* keys,
                                          int stride, int end, float* out, int64_t out_stride) {
  F32 acc[H][C];
#pragma GCC unroll 16
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) acc[h][c] = f_load(out + h * out_stride + c * 16);
  }
  for (int key = 0; key < end; ++key, probs += rows, keys += stride) {
    F32 value[C];
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) value[c] = f_load(keys + c * 16);
#pragma GCC unroll 16
    for (int h = 0; h < H; ++h) {
      const F32 p = f_set1(probs[h]);
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) acc[h][c] = f_fma(p, value[c], acc[h][c]);
    }
  }
#pragma GCC unroll 16
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) f_store(out + h * out_stride + c * 16, acc[h][c]);
  }
}

// One block of keys against all tokens that see it.
struct LatentBlock {
  const LatentQueries& q;
  const float* packed;  // [width][tokens][kHeadLanes]
  const float* keys;    // [kBlockKeys][stride], widened
  float* scores;        // [kBlockKeys][rows], turned into probabilities in place
  LatentPartial part;
  int width, rank, stride;
  int64_t key0;  // first position of the block

  // Keys of the block that a token sees.
  int seen(int token) const {
    return static_cast<int>(std::clamp<int64_t>(q.last_key(token) + 1 - key0, 0, kBlockKeys));
  }
};

template <int K, int C>
inline void score_tile(const LatentBlock& b, int token, int key) {
  const int rows = b.q.rows();
  for (int k = key; k < key + kKeyLanes; k += K)
    latent_score_block<K, C>(b.packed + token * kHeadLanes, rows, b.keys + k * b.stride, b.stride,
                             b.width, b.scores + k * rows + token * kHeadLanes);
}

// Scores of all tokens from `token` on against whole tiles that cover the first `keys` keys.
inline void score_latent(const LatentBlock& b, int token, int keys) {
  for (int k = 0; k < keys; k += kKeyLanes) {
    int t = token;
    for (; t + kScoreTokens <= b.q.tokens; t += kScoreTokens)
      score_tile<kScoreKeys, kScoreTokens>(b, t, k);
    for (; t < b.q.tokens; ++t) score_tile<kSingleKeys, 1>(b, t, k);
  }
}

// One online softmax step (arXiv:1805.02867) of the sixteen heads of a token.
inline void soften_latent(const LatentBlock& b, int token, int seen) {
  const int rows = b.q.rows(), lane = token * kHeadLanes;
  F32 highest = f_set1(kMinusInfinity);
  for (int k = 0; k < seen; ++k) highest = f_max(f_load(b.scores + k * rows + lane), highest);
  const F32 old = f_load(b.part.max + lane), max = f_max(highest, old);
  // One where the maximum stays.
  float shrink[kHeadLanes];
  f_store(shrink, f_exp(f_sub(old, max)));
  const int64_t out_stride = LatentPartial::stride(b.rank);
  for (int h = 0; h < kHeadLanes; ++h) {
    if (shrink[h] == 1.0f) continue;
    float* out = b.part.out + (lane + h) * out_stride;
    const F32 factor = f_set1(shrink[h]);
    for (int64_t d = 0; d < out_stride; d += 16) f_store(out + d, f_mul(f_load(out + d), factor));
  }
  F32 sum = f_mul(f_load(b.part.sum + lane), f_load(shrink));
  for (int k = 0; k < seen; ++k) {
    float* score = b.scores + k * rows + lane;
    const F32 p = f_exp(f_sub(f_load(score), max));
    f_store(score, p);
    sum = f_add(sum, p);
  }
  f_store(b.part.max + lane, max);
  f_store(b.part.sum + lane, sum);
}

inline void add_latent(const LatentBlock& b, int token, int seen) {
  const int rows = b.q.rows(), columns = static_cast<int>(LatentPartial::stride(b.rank));
  const int64_t out_stride = columns;
  for (int h = 0; h < kHeadLanes; h += kOutputHeads) {
    const float* probs = b.scores + token * kHeadLanes + h;
    float* out = b.part.out + (token * kHeadLanes + h) * out_stride;
    int c = 0;
    for (; c + 16 * kOutputVectors <= columns; c += 16 * kOutputVectors)
      latent_value_block<kOutputHeads, kOutputVectors>(probs, rows, b.keys + c, b.stride, seen,
                                                       out + c, out_stride);
    for (; c < columns; c += 16)
      latent_value_block<kOutputHeads, 1>(probs, rows, b.keys + c, b.stride, seen, out + c,
                                          out_stride);
  }
}

inline void attend_latent(const LatentQueries& q, const LatentCache& cache, int64_t segment,
                          const float* packed, float* work, LatentPartial out) {
  float* keys = work + kBlockKeys * q.rows();
  LatentBlock b{.q = q,
                .packed = packed,
                .keys = keys,
                .scores = work,
                .part = out,
                .width = cache.width,
                .rank = cache.rank,
                .stride = cache.stride(),
                .key0 = 0};
  const int rows = q.rows();
  const int64_t floats = rows * LatentPartial::stride(cache.rank);
  for (int r = 0; r < rows; r += 16) {
    f_store(out.max + r, f_set1(kMinusInfinity));
    f_store(out.sum + r, f_zero());
  }
  for (int64_t i = 0; i < floats; i += 16) f_store(out.out + i, f_zero());
  const int64_t end = std::min<int64_t>(segment_start(segment + 1), q.last_key(q.tokens - 1) + 1);
  for (b.key0 = segment_start(segment); b.key0 < end; b.key0 += kBlockKeys) {
    const int most = b.seen(q.tokens - 1);
    // Whole tiles of positions: pages are multiples of them.
    for (int k = 0; k < most; k += kKeyLanes)
      widen(cache.type, cache.row(b.key0 + k), kKeyLanes, cache.width, keys + k * b.stride);
    const int first = static_cast<int>(std::max<int64_t>(0, b.key0 - q.position));
    score_latent(b, first, most);
    for (int t = first; t < q.tokens; ++t) {
      const int seen = b.seen(t);
      soften_latent(b, t, seen);
      add_latent(b, t, seen);
    }
  }
}

inline void merge_latent(const LatentQueries& q, int rank, int64_t segment, LatentPartial part,
                         LatentPartial into) {
  const int64_t stride = LatentPartial::stride(rank);
  for (int t = 0; t < q.tokens; ++t) {
    if (segment > segment_of(q.last_key(t))) continue;
    const int lane = t * kHeadLanes;
    const float* from = part.out + lane * stride;
    float* to = into.out + lane * stride;
    const F32 max_a = f_load(into.max + lane), max_b = f_load(part.max + lane);
    if (segment == 0) {
      f_store(into.max + lane, max_b);
      f_store(into.sum + lane, f_load(part.sum + lane));
      std::memcpy(to, from, static_cast<size_t>(kHeadLanes * stride) * sizeof(float));
      continue;
    }
    const F32 max = f_max(max_b, max_a);
    const F32 a = f_exp(f_sub(max_a, max)), b = f_exp(f_sub(max_b, max));
    float weight_a[kHeadLanes], weight_b[kHeadLanes];
    f_store(weight_a, a);
    f_store(weight_b, b);
    f_store(into.max + lane, max);
    f_store(into.sum + lane, f_fma(f_load(into.sum + lane), a, f_mul(f_load(part.sum + lane), b)));
    for (int h = 0; h < kHeadLanes; ++h)
      merge_row(from + h * stride, weight_b[h], to + h * stride, weight_a[h], stride);
  }
}

inline void finish_latent(const LatentQueries& q, int rank, LatentPartial part) {
  const int64_t stride = LatentPartial::stride(rank);
  for (int t = 0; t < q.tokens; ++t) {
    for (int h = 0; h < q.heads; ++h) {
      const int row = t * kHeadLanes + h;
      const F32 sum = f_set1(part.sum[row]);
      const float* from = part.out + row * stride;
      float* to = q.out + t * q.absorbed_token + h * rank;
      int d = 0;
      for (; d + 16 <= rank; d += 16) f_store(to + d, f_div(f_load(from + d), sum));
      if (d < rank) f_store_n(to + d, rank - d, f_div(f_load(from + d), sum));
    }
  }
}

constexpr LatentKernels make_latent_kernels() {
  LatentKernels k{};
  k.store = store_latent;
  k.pack = pack_latent;
  k.attend = attend_latent;
  k.merge = merge_latent;
  k.finish = finish_latent;
  return k;
}

// Choice of experts for one token over the 16-lane names of simd/. Included in the anonymous
// namespace of each ISA.
#pragma once

#include "algo/float_kernels.h"

// e^(x[i] - minus) for all i, as out; returns their sum.
inline float exp_and_sum(const float* x, int n, float minus, float* out) {
  const F32 m = f_set1(minus);
  F32 sum = f_zero();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const F32 e = f_exp(f_sub(f_load(x + i), m));
    f_store(out + i, e);
    sum = f_add(sum, e);
  }
  if (i < n) {
    const F32 e = f_exp(f_sub(f_load_n(x + i, n - i), m));
    f_store_n(out + i, n - i, e);
    sum = f_add(sum, f_keep_n(e, n - i, 0.0f));
  }
  return f_sum(sum);
}

// What a group of n experts counts: its best, or with sigmoid scores the sum of its best two.
inline float group_score(const RouteRule& rule, const float* choice, int n) {
  int32_t index[2];
  float best[2];
  const int top = rule.scoring == Scoring::kSigmoid ? std::min(2, n) : 1;
  select_top(choice, n, index, best, top);
  return top == 2 ? best[0] + best[1] : best[0];
}

// -inf for the experts of all but the top_groups groups. work: groups floats.
inline void keep_top_groups(const RouteRule& rule, float* choice, float* work) {
  const int size = rule.experts / rule.groups;
  float* scores = work;
  for (int g = 0; g < rule.groups; ++g) scores[g] = group_score(rule, choice + g * size, size);
  for (int g = 0; g < rule.groups; ++g) {
    int better = 0;
    for (int other = 0; other < rule.groups; ++other)
      better += scores[other] > scores[g] || (scores[other] == scores[g] && other < g);
    if (better < rule.top_groups) continue;
    for (int i = 0; i < size; ++i) choice[g * size + i] = -std::numeric_limits<float>::infinity();
  }
}

inline bool has_nan(const float* x, int n) {
  bool found = false;
  for (int i = 0; i < n; ++i) found |= x[i] != x[i];
  return found;
}

// The largest of logits [n]; NaN if one is NaN or the largest is infinite.
inline float finite_maximum(const float* x, int n) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  if (has_nan(x, n)) return nan;
  float top = x[0];
  for (int i = 1; i < n; ++i) top = std::max(top, x[i]);
  return std::fabs(top) <= std::numeric_limits<float>::max() ? top : nan;
}

inline bool route_row_by(const RouteRule& rule, const float* logits, int32_t* ids, float* weights,
                         float* work) {
  const int experts = rule.experts, top_k = rule.top_k;
  const bool sigmoid = rule.scoring == Scoring::kSigmoid;
  const float top = finite_maximum(logits, experts);
  if (top != top) return false;
  // Unnormalized scores, and what the choice is made by. A larger logit is a larger softmax, so
  // that choice is made before rounding can tie.
  float *scores = work, *choice = work + experts;
  float sum = 1.0f;
  if (sigmoid) {
    for (int i = 0; i < experts; ++i) scores[i] = logits[i];
    sigmoid_row(scores, experts);
  } else {
    sum = exp_and_sum(logits, experts, top, scores);
  }
  const bool by_score = sigmoid || rule.bias != nullptr;
  for (int i = 0; i < experts; ++i) choice[i] = by_score ? scores[i] / sum : logits[i];
  if (rule.bias != nullptr) add_row(choice, rule.bias, experts);
  if (rule.groups > 1) keep_top_groups(rule, choice, work + 2 * experts);
  if (!select_top(choice, experts, ids, weights, top_k)) return false;
  for (int a = 0; a < top_k; ++a) weights[a] = scores[ids[a]];
  if (rule.normalize) {
    sum = sigmoid ? 1e-20f : 0.0f;  // sigmoids may all vanish
    for (int a = 0; a < top_k; ++a) sum += weights[a];
  }
  for (int a = 0; a < top_k; ++a) weights[a] = weights[a] / sum * rule.scale;
  return true;
}

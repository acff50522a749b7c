// Float row kernels over the 16-lane names of simd/. Included in the anonymous namespace of each
// ISA.
#pragma once

#include "algo/math.h"

inline void add_row(float* acc, const float* x, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) f_store(acc + i, f_add(f_load(acc + i), f_load(x + i)));
  if (i < n) f_store_n(acc + i, n - i, f_add(f_load_n(acc + i, n - i), f_load_n(x + i, n - i)));
}

inline void rmsnorm_row(const float* x, const float* weight, float* out, int n, float eps) {
  F32 squares = f_zero();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const F32 v = f_load(x + i);
    squares = f_fma(v, v, squares);
  }
  if (i < n) {
    const F32 v = f_load_n(x + i, n - i);
    squares = f_fma(v, v, squares);
  }
  const float mean = f_sum(squares) / static_cast<float>(n);
  const F32 scale = f_div(f_set1(1.0f), f_sqrt(f_set1(mean + eps)));
  for (i = 0; i + 16 <= n; i += 16)
    f_store(out + i, f_mul(f_mul(f_load(x + i), scale), f_load(weight + i)));
  if (i < n)
    f_store_n(out + i, n - i,
              f_mul(f_mul(f_load_n(x + i, n - i), scale), f_load_n(weight + i, n - i)));
}

inline void exp_row(float* x, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) f_store(x + i, f_exp(f_load(x + i)));
  if (i < n) f_store_n(x + i, n - i, f_exp(f_load_n(x + i, n - i)));
}

inline void sigmoid_row(float* x, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) f_store(x + i, f_sigmoid(f_load(x + i)));
  if (i < n) f_store_n(x + i, n - i, f_sigmoid(f_load_n(x + i, n - i)));
}

inline void silu_mul_row(const float* gate, const float* up, float* out, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) f_store(out + i, f_mul(f_silu(f_load(gate + i)), f_load(up + i)));
  if (i < n)
    f_store_n(out + i, n - i, f_mul(f_silu(f_load_n(gate + i, n - i)), f_load_n(up + i, n - i)));
}

inline void rope_halves(float* x, const float* cos, const float* sin, int half) {
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const F32 a = f_load(x + i), b = f_load(x + half + i);
    const F32 c = f_load(cos + i), s = f_load(sin + i);
    f_store(x + i, f_sub(f_mul(a, c), f_mul(b, s)));
    f_store(x + half + i, f_add(f_mul(b, c), f_mul(a, s)));
  }
  if (i < half) {
    const int n = half - i;
    const F32 a = f_load_n(x + i, n), b = f_load_n(x + half + i, n);
    const F32 c = f_load_n(cos + i, n), s = f_load_n(sin + i, n);
    f_store_n(x + i, n, f_sub(f_mul(a, c), f_mul(b, s)));
    f_store_n(x + half + i, n, f_add(f_mul(b, c), f_mul(a, s)));
  }
}

inline void rope_head(float* x, const float* cos, const float* sin, int half, bool interleaved) {
  if (!interleaved) return rope_halves(x, cos, sin, half);
  for (int i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

// The top_k largest of x [n], descending, equal ones in ascending index; false if one is NaN.
inline bool select_top(const float* x, int n, int32_t* index, float* value, int top_k) {
  int found = 0;
  for (int i = 0; i < n; ++i) {
    const float v = x[i];
    if (found == top_k && v <= value[top_k - 1]) continue;
    if (v != v) return false;
    int at = found < top_k ? found++ : top_k - 1;
    for (; at > 0 && value[at - 1] < v; --at) {
      value[at] = value[at - 1];
      index[at] = index[at - 1];
    }
    value[at] = v;
    index[at] = i;
  }
  return true;
}

inline float sum_of_exp(const float* x, int n, float minus) {
  const F32 m = f_set1(minus);
  F32 sum = f_zero();
  int i = 0;
  for (; i + 16 <= n; i += 16) sum = f_add(sum, f_exp(f_sub(f_load(x + i), m)));
  if (i < n) sum = f_add(sum, f_keep_n(f_exp(f_sub(f_load_n(x + i, n - i), m)), n - i, 0.0f));
  return f_sum(sum);
}

inline bool route_row(const float* logits, int experts, int32_t* ids, float* weights, int top_k,
                      bool normalize) {
  if (!select_top(logits, experts, ids, weights, top_k)) return false;
  const float top = weights[0];
  if (!(std::fabs(top) <= std::numeric_limits<float>::max())) return false;
  for (int a = 0; a < top_k; ++a) weights[a] -= top;
  exp_row(weights, top_k);
  float sum = 0.0f;
  if (normalize) {
    for (int a = 0; a < top_k; ++a) sum += weights[a];
  } else {
    sum = sum_of_exp(logits, experts, top);
  }
  for (int a = 0; a < top_k; ++a) weights[a] /= sum;
  return true;
}

constexpr FloatKernels make_float_kernels() {
  FloatKernels k{};
  k.add = add_row;
  k.rmsnorm = rmsnorm_row;
  k.exp = exp_row;
  k.sigmoid = sigmoid_row;
  k.silu_mul = silu_mul_row;
  k.rope = rope_head;
  k.route = route_row;
  return k;
}

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

constexpr FloatKernels make_float_kernels() {
  FloatKernels k{};
  k.add = add_row;
  k.rmsnorm = rmsnorm_row;
  return k;
}

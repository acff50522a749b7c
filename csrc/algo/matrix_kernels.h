// Packed matrix kernels over simd/ and micro/. Included in the anonymous namespace of each ISA.
#pragma once

#include "algo/decode.h"
#include "algo/math.h"
//
#include "algo/activation_kernels.h"
#include "algo/tiles_int.h"
#include "algo/tiles_table.h"
//
#include "algo/tiles_float.h"

inline void combine_biased(const float* x, int64_t ld, int m, int n, const float* bias,
                           const float* weight, const int32_t* index, float* out, int64_t out_ld) {
  for (int i = 0; i < m; ++i, x += ld) {
    const F32 w = f_set1(weight[i]);
    float* to = out + index[i] * out_ld;
    int c = 0;
    for (; c + 16 <= n; c += 16)
      f_store(to + c, f_fma(w, f_add(f_load(x + c), f_load(bias + c)), f_load(to + c)));
    if (c == n) continue;
    const F32 y = f_add(f_load_n(x + c, n - c), f_load_n(bias + c, n - c));
    f_store_n(to + c, n - c, f_fma(w, y, f_load_n(to + c, n - c)));
  }
}

void combine_rows(const float* x, int64_t ld, int m, int n, const float* bias, const float* weight,
                  const int32_t* index, float* out, int64_t out_ld) {
  if (bias != nullptr) return combine_biased(x, ld, m, n, bias, weight, index, out, out_ld);
  for (int i = 0; i < m; ++i, x += ld) {
    const F32 w = f_set1(weight[i]);
    float* to = out + index[i] * out_ld;
    int c = 0;
    for (; c + 16 <= n; c += 16) f_store(to + c, f_fma(w, f_load(x + c), f_load(to + c)));
    if (c < n) f_store_n(to + c, n - c, f_fma(w, f_load_n(x + c, n - c), f_load_n(to + c, n - c)));
  }
}

template <class Layout>
constexpr auto tiles_of() {
  if constexpr (Layout::kFloat) {
    return float_tiles<Layout>;
  } else if constexpr (requires { Layout::kGrid; }) {
    return table_tiles<Layout>;
  } else {
    return int_tiles<Layout>;
  }
}

#include "algo/probe_kernels.h"

constexpr MatrixKernels make_matrix_kernels() {
  return {.folds = false,
          .quantize = quantize_row<FloatRows>,
          .gate_quantize =
              {
#define MOESTRO_ACTIVATION(kind, name, gate) gate_quantize_rows<gate, FloatRows>,
#include "isa/activation.def"
#undef MOESTRO_ACTIVATION
              },
          .combine = combine_rows,
          .tiles =
              {
#define MOESTRO_FORMAT(kind, layout, stem, grouped) tiles_of<layout>(),
#include "formats/formats.def"
#undef MOESTRO_FORMAT
              },
          .read_bytes = read_bytes,
          .dot_peak = dot_peak,
          .fma_peak = fma_peak,
          .bf16_peak = fma_peak};
}

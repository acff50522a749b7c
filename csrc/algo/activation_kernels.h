// Activations prepared for packed matrices. Included in the anonymous namespace of each ISA.
#pragma once

#include "algo/gates.h"

// One block of 32 channels -> 32 signed bytes with scale amax / 127, rounded half to even. A block
// with a NaN or infinity gets scale NaN and codes 0, so the result is NaN and never a plausible
// number; one whose amax would make 127 / amax overflow counts as zero.
constexpr float kSmallestAmax = 1e-30f;

inline void quantize_block(F32 a, F32 b, const LayoutFacts& facts, ActivationBlock& out) {
  // As integers the bits of non-negative floats have the order of their values, NaN above infinity.
  const int32_t largest = i_max_lane(i_max(i_bits(f_abs(a)), i_bits(f_abs(b))));
  const float amax = std::bit_cast<float>(largest);
  float scale = 0.0f, inverse = 0.0f;
  if (largest >= 0x7f800000) {
    scale = std::numeric_limits<float>::quiet_NaN();
    a = b = f_zero();
  } else if (amax >= kSmallestAmax) {
    scale = amax / 127.0f;
    inverse = 127.0f / amax;
  }
  const F32 factor = f_set1(inverse);
  const I32 first = i_from_f(f_mul(a, factor)), second = i_from_f(f_mul(b, factor));
  i_store_i8(out.q, first);
  i_store_i8(out.q + 16, second);
  out.scale = scale;
  int32_t sum[2] = {};
  if (facts.steps == 2) {
    sum[0] = i_sum(first);
    sum[1] = i_sum(second);
  } else {
    sum[0] = i_sum(i_add(first, second));
  }
  for (int s = 0; s < 2; ++s) {
    if (facts.has_min) {
      out.sum[s] = static_cast<float>(sum[s]) * scale;
    } else {
      out.init[s] = -facts.zero * sum[s];
    }
  }
}

// Float activations as they are.
struct FloatRows {
  static void store(const Activations& act, int64_t row, int64_t first, F32 a, F32 b) {
    float* x = act.x + (row * act.blocks + first / kBlockChannels) * kBlockChannels;
    f_store(x, a);
    f_store(x + 16, b);
  }
};

// Channels first..first+31 of a row. Float::store(act, row, first, a, b) keeps those of float
// formats, and the floats that may come beside bytes.
template <class Float>
inline void store_block(F32 a, F32 b, const Activations& act, int64_t row, int64_t first) {
  if (act.x != nullptr) Float::store(act, row, first, a, b);
  if (act.packed != nullptr)
    quantize_block(a, b, layout_facts(act.kind),
                   act.packed[row * act.blocks + first / kBlockChannels]);
}

template <class Float>
void quantize_row(const float* x, int n, const Activations& act, int64_t row, int64_t first) {
  for (int i = 0; i < n; i += kBlockChannels) {
    if (i + kBlockChannels <= n) {
      store_block<Float>(f_load(x + i), f_load(x + i + 16), act, row, first + i);
    } else {
      const F32 a = f_load_n(x + i, n - i);
      const F32 b = n - i > 16 ? f_load_n(x + i + 16, n - i - 16) : f_zero();
      store_block<Float>(a, b, act, row, first + i);
    }
  }
}

// Channels first..first+15 of n that are added to a block; zero where there is nothing.
inline F32 load_bias(const float* bias, int first, int n) {
  if (bias == nullptr || n <= first) return f_zero();
  return n - first < 16 ? f_load_n(bias + first, n - first) : f_load(bias + first);
}

template <class Gate, class Float>
void gate_quantize_rows(const GateBlock& block, const Activations& act, int64_t row0,
                        int64_t first) {
  const float *gate = block.gate, *up = block.up;
  const int n = block.n;
  const F32 gate_a = load_bias(block.gate_bias, 0, n), gate_b = load_bias(block.gate_bias, 16, n);
  const F32 up_a = load_bias(block.up_bias, 0, n), up_b = load_bias(block.up_bias, 16, n);
  for (int i = 0; i < block.m; ++i, gate += kBlockChannels, up += kBlockChannels) {
    F32 a = Gate::apply(f_add(f_load(gate), gate_a), f_add(f_load(up), up_a));
    F32 b = Gate::apply(f_add(f_load(gate + 16), gate_b), f_add(f_load(up + 16), up_b));
    if (n < kBlockChannels) {
      a = f_keep_n(a, n, 0.0f);
      b = f_keep_n(b, n - 16, 0.0f);
    }
    store_block<Float>(a, b, act, row0 + i, first);
  }
}

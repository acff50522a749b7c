// Leaf kernels over float rows.
#pragma once

#include <cstdint>

namespace moestro {

struct FloatKernels {
  // acc[i] += x[i]
  void (*add)(float* acc, const float* x, int n);
  // out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]; out may be x
  void (*rmsnorm)(const float* x, const float* weight, float* out, int n, float eps);
  // x[i] = e^x[i]
  void (*exp)(float* x, int n);
  // x[i] = 1 / (1 + e^-x[i])
  void (*sigmoid)(float* x, int n);
  // out[i] = silu(gate[i]) * up[i]; out may be gate or up
  void (*silu_mul)(const float* gate, const float* up, float* out, int n);
  // Turns one head's leading 2 * half channels by the angles whose cos and sin [half] are given:
  // pairs (i, i + half), or (2i, 2i + 1) if interleaved.
  void (*rope)(float* x, const float* cos, const float* sin, int half, bool interleaved);
  // The top_k largest of logits [experts] in descending order (ties: lower id first), and their
  // softmax probabilities, divided by their own sum if normalize. False, with ids and weights
  // undefined, if a logit is NaN or the largest is infinite.
  bool (*route)(const float* logits, int experts, int32_t* ids, float* weights, int top_k,
                bool normalize);
};

}  // namespace moestro

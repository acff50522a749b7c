// Leaf kernels over float rows.
#pragma once

namespace moestro {

struct FloatKernels {
  // acc[i] += x[i]
  void (*add)(float* acc, const float* x, int n);
  // out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]; out may be x
  void (*rmsnorm)(const float* x, const float* weight, float* out, int n, float eps);
};

}  // namespace moestro

// Attention kernels over the 16-lane names of simd/. Included in the anonymous namespace of each ISA.
#pragma once

constexpr AttentionKernels make_attention_kernels() {
  AttentionKernels k{};
  return k;
}

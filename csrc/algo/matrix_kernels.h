// Packed matrix kernels over simd/ and micro/. Included in the anonymous namespace of each ISA.
#pragma once

constexpr MatrixKernels make_matrix_kernels() {
  MatrixKernels k{};
  return k;
}

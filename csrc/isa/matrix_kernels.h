// Leaf kernels of packed matrices: activation quantization and tile products.
#pragma once

namespace moestro {

struct MatrixKernels {};

}  // namespace moestro

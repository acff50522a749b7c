// Leaf kernels of attention over the paged cache.
#pragma once

namespace moestro {

struct AttentionKernels {};

}  // namespace moestro

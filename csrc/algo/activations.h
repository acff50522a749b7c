// Buffers of activations prepared for packed matrices.
#pragma once

#include <vector>

#include "isa/matrix_kernels.h"

namespace moestro {

// Owns `capacity` rows of prepared activations for one weight format: floats for float formats,
// bytes for integer ones, and both where same_bits() is off and the kernels make use of it.
class ActivationBuffer {
 public:
  ActivationBuffer(const PackedMatrix& weight, int64_t capacity);
  ActivationBuffer(const ActivationBuffer&) = delete;
  ActivationBuffer& operator=(const ActivationBuffer&) = delete;

  const Activations& view() const { return view_; }

 private:
  Activations view_{};
  std::vector<float> x_;
  std::vector<ActivationBlock> packed_;
};

// Prepares a whole row of `cols` channels for a weight; channel j of it is x[order[j]], or x[j]
// where order is null.
void prepare_row(const float* x, const int32_t* order, int64_t cols, const Activations& act,
                 int64_t row);

// True if activations prepared for one of them serve the other too.
bool share_activations(const PackedMatrix& a, const PackedMatrix& b);

}  // namespace moestro

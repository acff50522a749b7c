// Buffers of activations prepared for packed matrices.
#pragma once

#include <vector>

#include "isa/matrix_kernels.h"

namespace moestro {

// Owns `capacity` rows of prepared activations for one weight format.
class ActivationBuffer {
 public:
  ActivationBuffer(const PackedMatrix& weight, int64_t capacity);
  ActivationBuffer(const ActivationBuffer&) = delete;
  ActivationBuffer& operator=(const ActivationBuffer&) = delete;

  const Activations& view() const { return view_; }

 private:
  Activations view_{};
  std::vector<float> x_, scale_, sum_;
  std::vector<int8_t> q_;
  std::vector<int32_t> init_;
};

// True if activations prepared for one of them serve the other too.
bool share_activations(const PackedMatrix& a, const PackedMatrix& b);

}  // namespace moestro

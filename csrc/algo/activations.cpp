#include "algo/activations.h"

namespace moestro {

ActivationBuffer::ActivationBuffer(const PackedMatrix& weight, int64_t capacity) {
  const LayoutFacts& facts = layout_facts(weight.kind);
  const size_t channels = size_t(capacity) * size_t(weight.padded_cols);
  const size_t blocks = channels / kBlockChannels;
  if (facts.is_float) {
    x_.resize(channels);
  } else {
    q_.resize(channels);
    scale_.resize(blocks);
    init_.resize(blocks * size_t(facts.steps));
    if (facts.has_min) sum_.resize(blocks);
  }
  view_ = {.kind = weight.kind,
           .ld = weight.padded_cols,
           .x = x_.data(),
           .q = q_.data(),
           .scale = scale_.data(),
           .init = init_.data(),
           .sum = sum_.data()};
}

bool share_activations(const PackedMatrix& a, const PackedMatrix& b) {
  const LayoutFacts &fa = layout_facts(a.kind), &fb = layout_facts(b.kind);
  if (a.padded_cols != b.padded_cols || fa.is_float != fb.is_float) return false;
  return fa.is_float ||
         (fa.steps == fb.steps && fa.zero == fb.zero && fa.has_min == fb.has_min);
}

}  // namespace moestro

#include "algo/activations.h"

#include <algorithm>

#include "isa/dispatch.h"

namespace moestro {

ActivationBuffer::ActivationBuffer(const PackedMatrix& weight, int64_t capacity) {
  const size_t blocks = size_t(capacity) * size_t(weight.blocks());
  const bool is_float = layout_facts(weight.kind).is_float;
  const bool floats = is_float || (isa().matrix.folds && !same_bits());
  if (floats) x_.resize(blocks * kBlockChannels);
  if (!is_float) packed_.resize(blocks);
  view_ = {.kind = weight.kind,
           .blocks = weight.blocks(),
           .x = floats ? x_.data() : nullptr,
           .packed = is_float ? nullptr : packed_.data()};
}

void prepare_row(const float* x, const int32_t* order, int64_t cols, const Activations& act,
                 int64_t row) {
  const auto quantize = isa().matrix.quantize;
  if (order == nullptr) return quantize(x, static_cast<int>(cols), act, row, 0);
  constexpr int64_t kPiece = 8 * kBlockChannels;
  float piece[kPiece];
  for (int64_t first = 0; first < cols; first += kPiece) {
    const int64_t n = std::min(kPiece, cols - first);
    for (int64_t i = 0; i < n; ++i) piece[i] = x[order[first + i]];
    quantize(piece, static_cast<int>(n), act, row, first);
  }
}

bool share_activations(const PackedMatrix& a, const PackedMatrix& b) {
  const LayoutFacts &fa = layout_facts(a.kind), &fb = layout_facts(b.kind);
  if (a.padded_cols != b.padded_cols || fa.is_float != fb.is_float || fa.pairs != fb.pairs)
    return false;
  return fa.is_float || (fa.steps == fb.steps && fa.zero == fb.zero && fa.has_min == fb.has_min);
}

}  // namespace moestro

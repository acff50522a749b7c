#include "algo/expert_group.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "isa/dispatch.h"

namespace moestro {
namespace {

// An expert's biases [experts, rows] from a channel on; null if there are none.
const float* bias_of(const float* biases, int32_t expert, int64_t rows, int64_t channel) {
  return biases == nullptr ? nullptr : biases + expert * rows + channel;
}

}  // namespace

ExpertGroup::ExpertGroup(const ExpertArgs& args, int64_t capacity, const ExpertGroup* like)
    : a_(args),
      like_(like != nullptr && !like->ordered() && !ordered() &&
                    share_activations(like->a_.gate.matrix, args.gate.matrix)
                ? like
                : nullptr),
      h_(args.down.matrix, capacity * args.top_k),
      token_(size_t(capacity * args.top_k)),
      slot_(token_.size()),
      weight_(token_.size(), 1.0f),
      next_(size_t(args.experts) + 1) {
  const int64_t inputs = ordered() ? capacity * args.top_k : capacity;
  if (like_ == nullptr) x_ = std::make_unique<ActivationBuffer>(args.gate.matrix, inputs);
  if (!share_activations(args.gate.matrix, args.up.matrix))
    x_up_ = std::make_unique<ActivationBuffer>(args.up.matrix, inputs);
  spans_.reserve(size_t(args.experts) + token_.size() / size_t(kChunkTokens) + 1);
  all_.resize(spans_.capacity());
  std::iota(all_.begin(), all_.end(), 0);
}

void ExpertGroup::quantize(const float* x, int64_t token) {
  if (ordered()) return;
  const int64_t cols = a_.gate.matrix.cols;
  for (const auto* buffer : {x_.get(), x_up_.get()})
    if (buffer != nullptr) prepare_row(x + token * cols, nullptr, cols, buffer->view(), token);
}

void ExpertGroup::quantize_span(const float* x, int64_t index) {
  const Span& span = spans_[size_t(index)];
  const int64_t cols = a_.gate.matrix.cols;
  const int32_t* order = a_.input_orders + span.expert * cols;
  for (int64_t at = span.first; at < span.first + span.count; ++at)
    for (const auto* buffer : {x_.get(), x_up_.get()})
      if (buffer != nullptr)
        prepare_row(x + token_[size_t(at)] * cols, order, cols, buffer->view(), at);
}

const uint8_t* ExpertGroup::blob_of(int64_t expert) const {
  if (a_.pointers == nullptr) return nullptr;
  if (a_.pointers[expert] == 0 && !a_.skip_absent)
    throw invalid_request("expert " + std::to_string(expert) + " is not in memory");
  return reinterpret_cast<const uint8_t*>(a_.pointers[expert]);
}

// Counting sort of the live (token, slot) pairs by expert; within one, tokens ascend.
void ExpertGroup::group_by_expert(int64_t tokens) {
  std::fill(next_.begin(), next_.end(), 0);
  for (int64_t i = 0; i < tokens * a_.top_k; ++i) {
    if (a_.ids[i] >= a_.experts)
      throw invalid_request("expert id " + std::to_string(a_.ids[i]) + " at row " +
                            std::to_string(i / a_.top_k) + " is not below " +
                            std::to_string(a_.experts));
    if (a_.ids[i] >= 0) ++next_[size_t(a_.ids[i]) + 1];
  }
  spans_.clear();
  for (int64_t e = 0; e < a_.experts; ++e) {
    const int32_t first = next_[size_t(e)], end = first + next_[size_t(e) + 1];
    next_[size_t(e) + 1] = end;
    if (first == end) continue;
    const uint8_t* blob = blob_of(e);
    if (blob == nullptr && a_.skip_absent) continue;
    for (int32_t at = first; at < end; at += kChunkTokens)
      spans_.push_back(
          {blob, static_cast<int32_t>(e), at, std::min<int32_t>(kChunkTokens, end - at)});
  }
  for (int64_t i = 0; i < tokens * a_.top_k; ++i) {
    if (a_.ids[i] < 0) continue;
    const int32_t at = next_[size_t(a_.ids[i])]++;
    token_[size_t(at)] = static_cast<int32_t>(i / a_.top_k);
    slot_[size_t(at)] = static_cast<int32_t>(i);
    if (a_.weights != nullptr) weight_[size_t(at)] = a_.weights[i];
  }
}

PackedMatrix ExpertGroup::matrix_in(const ExpertMatrix& m, const uint8_t* blob) {
  PackedMatrix found = m.matrix;
  found.data = blob + m.offset;
  return found;
}

const uint8_t* ExpertGroup::pair_of(const PackedMatrix& m, int64_t pair) {
  return m.row_tile(std::min(2 * pair, m.row_tiles()));
}

// One pair of gate or up tiles. Leaves rows of 32 floats even for a lone last tile.
void ExpertGroup::run_pair(Worker& worker, const PackedMatrix& m, const Span& span, int64_t pair,
                           const TileRun& run, const Activations& act, float* out) const {
  TileJob job = tile_job(m, 2 * pair, m.row_tiles(), run, ordered() ? act.from(span.first) : act,
                         span.count, out, worker.scratch());
  if (!ordered()) job.rows = token_.data() + span.first;
  isa().matrix.tiles[static_cast<int>(m.kind)](job);
  if (job.tiles == 2) return;
  for (int i = job.m - 1; i >= 0; --i) {
    std::copy_backward(out + i * kTileChannels, out + (i + 1) * kTileChannels,
                       out + i * kPairChannels + kTileChannels);
    std::fill_n(out + i * kPairChannels + kTileChannels, kTileChannels, 0.0f);
  }
}

// Intermediate channels of blocks [block, end) for one span. With few tokens several blocks of
// gate are read before up: the longer a run of bytes, the more of it the hardware prefetches.
void ExpertGroup::gate_up(Worker& worker, int64_t index, int64_t block, int64_t end) {
  const Span& span = spans_[size_t(index)];
  const auto gate_quantize = isa().matrix.gate_quantize[static_cast<int>(a_.activation)];
  const int64_t size = span.count * kPairChannels;
  const PackedMatrix gates = matrix_in(a_.gate, span.blob), ups = matrix_in(a_.up, span.blob);
  auto* gate = reinterpret_cast<float*>(worker.scratch() + kTileScratchBytes);
  float* up = gate + kChunkTokens * kPairChannels;
  for (; block < end; block += kChunkTokens / span.count) {
    const int64_t blocks = std::min<int64_t>(end - block, kChunkTokens / span.count);
    const uint8_t* gate_end = pair_of(gates, block + blocks);
    const TileRun gate_run{gate_end, pair_of(ups, block)};
    const TileRun up_run{pair_of(ups, block + blocks), gate_end};
    for (int64_t i = 0; i < blocks; ++i)
      run_pair(worker, gates, span, block + i, gate_run, gate_input(), gate + i * size);
    for (int64_t i = 0; i < blocks; ++i)
      run_pair(worker, ups, span, block + i, up_run, up_input(), up + i * size);
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t channel = (block + i) * kPairChannels;
      const int64_t rows = gates.rows;
      const GateBlock pair{.gate = gate + i * size,
                           .up = up + i * size,
                           .gate_bias = bias_of(a_.gate_bias, span.expert, rows, channel),
                           .up_bias = bias_of(a_.up_bias, span.expert, rows, channel),
                           .m = span.count,
                           .n = static_cast<int>(std::min(kPairChannels, rows - channel))};
      gate_quantize(pair, h_.view(), span.first, channel);
    }
  }
}

void ExpertGroup::add_experts(Worker& worker, Slice chosen, int64_t pair, int64_t end, float* sums,
                              int64_t ld) const {
  down(worker, chosen, pair, end, {token_.data(), weight_.data(), sums, ld, false});
}

void ExpertGroup::write_slots(Worker& worker, Slice chosen, int64_t pair, int64_t end, float* slots,
                              int64_t ld) const {
  down(worker, chosen, pair, end, {slot_.data(), weight_.data(), slots, ld, true});
}

void ExpertGroup::down(Worker& worker, Slice chosen, int64_t pair, int64_t pair_end,
                       const Target& target) const {
  auto* result = reinterpret_cast<float*>(worker.scratch() + kTileScratchBytes);
  const MatrixKernels& kernels = isa().matrix;
  for (int64_t s = chosen.first; s < chosen.end; ++s) {
    const Span& span = spans_[size_t(s)];
    const PackedMatrix down = matrix_in(a_.down, span.blob);
    TileRun run{pair_of(down, pair_end), pair_of(down, pair_end)};
    if (s + 1 < chosen.end)
      run.next = pair_of(matrix_in(a_.down, spans_[size_t(s) + 1].blob), pair);
    const Activations act = h_.view().from(span.first);
    const int32_t* index = target.index + span.first;
    for (int64_t p = pair; p < pair_end; ++p) {
      const TileJob job =
          tile_job(down, 2 * p, down.row_tiles(), run, act, span.count, result, worker.scratch());
      kernels.tiles[static_cast<int>(down.kind)](job);
      const int64_t channel = p * kPairChannels;
      const int64_t width = job.tiles * kTileChannels;
      const int64_t live = std::min(width, down.rows - channel);
      float* out = target.out + channel - pair * kPairChannels;
      // Minus zero is what leaves every number as it is when added, also a zero of either sign.
      if (target.fresh)
        for (int32_t i = 0; i < span.count; ++i)
          std::fill_n(out + index[i] * target.ld, live, -0.0f);
      kernels.combine(result, width, span.count, static_cast<int>(live),
                      bias_of(a_.down_bias, span.expert, down.rows, channel),
                      target.weight + span.first, index, out, target.ld);
    }
  }
}

}  // namespace moestro

#include "algo/expert_group.h"

#include <algorithm>
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
      like_(like != nullptr && share_activations(like->a_.gate.matrix, args.gate.matrix) ? like
                                                                                         : nullptr),
      h_(args.down.matrix, capacity * args.top_k),
      token_(size_t(capacity * args.top_k)),
      weight_(token_.size()),
      next_(size_t(args.experts) + 1) {
  if (like_ == nullptr) x_ = std::make_unique<ActivationBuffer>(args.gate.matrix, capacity);
  if (!share_activations(args.gate.matrix, args.up.matrix))
    x_up_ = std::make_unique<ActivationBuffer>(args.up.matrix, capacity);
  spans_.reserve(size_t(args.experts) + token_.size() / size_t(kChunkTokens) + 1);
}

void ExpertGroup::quantize(const float* x, int64_t token) {
  const auto cols = static_cast<int>(a_.gate.matrix.cols);
  for (const auto* buffer : {x_.get(), x_up_.get()})
    if (buffer != nullptr) isa().matrix.quantize(x + token * cols, cols, buffer->view(), token, 0);
}

const uint8_t* ExpertGroup::blob_of(int64_t expert) const {
  if (a_.pointers[expert] == 0)
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
    for (int32_t at = first; at < end; at += kChunkTokens)
      spans_.push_back(
          {blob_of(e), static_cast<int32_t>(e), at, std::min<int32_t>(kChunkTokens, end - at)});
    next_[size_t(e) + 1] = end;
  }
  for (int64_t i = 0; i < tokens * a_.top_k; ++i) {
    if (a_.ids[i] < 0) continue;
    const int32_t at = next_[size_t(a_.ids[i])]++;
    token_[size_t(at)] = static_cast<int32_t>(i / a_.top_k);
    weight_[size_t(at)] = a_.weights[i];
  }
}

// Where tile pairs from `pair` on begin in an expert's blob; where its matrix ends if past that.
const uint8_t* ExpertGroup::pair_of(const ExpertMatrix& m, const uint8_t* blob, int64_t pair) {
  return blob + m.offset + std::min(2 * pair, m.matrix.row_tiles()) * m.matrix.stride();
}

TileJob ExpertGroup::pair_job(const ExpertMatrix& m, const uint8_t* blob, int64_t pair,
                              const Run& run, const Activations& act, int count, float* out,
                              std::byte* scratch) {
  const int64_t n = 2 * pair;
  TileJob job{};
  job.tiles = static_cast<int>(std::min<int64_t>(2, m.matrix.row_tiles() - n));
  job.tile[0] = pair_of(m, blob, pair);
  job.tile[1] = job.tile[0] + (job.tiles - 1) * m.matrix.stride();
  job.tile_blocks = m.matrix.tile_blocks;
  job.tile_bytes = m.matrix.tile_bytes;
  job.blocks = m.matrix.blocks();
  job.run_end = run.end;
  job.run_jump = run.next - run.end;
  job.act = act;
  job.m = count;
  job.out = out;
  job.scratch = scratch;
  return job;
}

// One pair of gate or up tiles. Leaves rows of 32 floats even for a lone last tile.
void ExpertGroup::run_pair(Worker& worker, const ExpertMatrix& m, const Span& span, int64_t pair,
                           const Run& run, const Activations& act, float* out) const {
  TileJob job = pair_job(m, span.blob, pair, run, act, span.count, out, worker.scratch());
  job.rows = token_.data() + span.first;
  isa().matrix.tiles[static_cast<int>(m.matrix.kind)](job);
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
  auto* gate = reinterpret_cast<float*>(worker.scratch() + kTileScratchBytes);
  float* up = gate + kChunkTokens * kPairChannels;
  for (; block < end; block += kChunkTokens / span.count) {
    const int64_t blocks = std::min<int64_t>(end - block, kChunkTokens / span.count);
    const uint8_t* gate_end = pair_of(a_.gate, span.blob, block + blocks);
    const Run gates{gate_end, pair_of(a_.up, span.blob, block)};
    const Run ups{pair_of(a_.up, span.blob, block + blocks), gate_end};
    for (int64_t i = 0; i < blocks; ++i)
      run_pair(worker, a_.gate, span, block + i, gates, gate_input(), gate + i * size);
    for (int64_t i = 0; i < blocks; ++i)
      run_pair(worker, a_.up, span, block + i, ups, up_input(), up + i * size);
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t channel = (block + i) * kPairChannels;
      const int64_t rows = a_.gate.matrix.rows;
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

void ExpertGroup::add_experts(Worker& worker, int64_t pair, int64_t pair_end, float* sums,
                              int64_t ld) const {
  auto* result = reinterpret_cast<float*>(worker.scratch() + kTileScratchBytes);
  const MatrixKernels& kernels = isa().matrix;
  for (size_t s = 0; s < spans_.size(); ++s) {
    const Span& span = spans_[s];
    const uint8_t* end = pair_of(a_.down, span.blob, pair_end);
    const Run run{end, s + 1 < spans_.size() ? pair_of(a_.down, spans_[s + 1].blob, pair) : end};
    const Activations act = h_.view().from(span.first);
    for (int64_t p = pair; p < pair_end; ++p) {
      const TileJob job =
          pair_job(a_.down, span.blob, p, run, act, span.count, result, worker.scratch());
      kernels.tiles[static_cast<int>(a_.down.matrix.kind)](job);
      const int64_t channel = p * kPairChannels;
      const int64_t width = job.tiles * kTileChannels;
      kernels.combine(result, width, span.count,
                      static_cast<int>(std::min(width, a_.down.matrix.rows - channel)),
                      bias_of(a_.down_bias, span.expert, a_.down.matrix.rows, channel),
                      weight_.data() + span.first, token_.data() + span.first,
                      sums + channel - pair * kPairChannels, ld);
    }
  }
}

}  // namespace moestro

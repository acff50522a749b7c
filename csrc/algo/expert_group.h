// The experts of one table in the MoE operator: their tokens, activations and products (see
// moe.cpp).
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "algo/activations.h"
#include "algo/moe.h"
#include "algo/tile_job.h"
#include "core/team.h"
#include "isa/matrix_kernels.h"

namespace moestro {

constexpr int64_t kPairChannels = 2 * kTileChannels;
static_assert(kPairChannels == kBlockChannels, "a pair of tiles fills one activation block");
// Tokens of one expert that a kernel call takes at most.
constexpr int64_t kChunkTokens = 128;
// Output channels of one task of down, summed in a compact copy, must fit beside its results.
constexpr int64_t kCompactFloats =
    (int64_t{Worker::kScratchBytes} - kTileScratchBytes) / 4 - kChunkTokens * kPairChannels;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class ExpertGroup {
 public:
  // Consecutive entries of the expert order that share an expert.
  struct Span {
    const uint8_t* blob;
    int32_t expert;
    int32_t first;
    int32_t count;
  };

  // `like`: another group on the same tokens, whose prepared activations serve this one too where
  // the formats allow it, or null.
  ExpertGroup(const ExpertArgs& args, int64_t capacity, const ExpertGroup* like);

  // Phase 1: which tokens each expert has, and each token's activations. Without pointers in its
  // arguments nothing says yet where an expert is: place() does.
  void group_by_expert(int64_t tokens);
  void quantize(const float* x, int64_t token);
  // After that, where experts want the channels in orders of their own: the activations of one
  // span.
  void quantize_span(const float* x, int64_t span);
  int64_t ordered_spans() const { return ordered() ? static_cast<int64_t>(spans_.size()) : 0; }

  // Phase 2: h of intermediate channels of blocks [block, end), 32 each, for one span.
  void gate_up(Worker& worker, int64_t span, int64_t block, int64_t end);

  // Phase 3: sums[t] += weight * down(h) of spans `chosen`, whose experts ascend, for pairs
  // [pair, end) of output tiles; column 0 of sums is the first pair's, its rows are `ld` apart.
  void add_experts(Worker& worker, Slice chosen, int64_t pair, int64_t end, float* sums,
                   int64_t ld) const;
  // Or instead: slots[i] = down(h) of each entry of the spans, where ids[i] chose it.
  void write_slots(Worker& worker, Slice chosen, int64_t pair, int64_t end, float* slots,
                   int64_t ld) const;

  // In the order of experts; all() are their indices.
  const std::vector<Span>& spans() const { return spans_; }
  std::span<const int32_t> all() const { return {all_.data(), spans_.size()}; }
  void place(int64_t span, const uint8_t* blob) { spans_[size_t(span)].blob = blob; }
  int64_t blocks() const { return ceil_div(a_.gate.matrix.rows, kPairChannels); }

 private:
  // Where the results of down go: out[index[entry]] += weight[entry] * result.
  struct Target {
    const int32_t* index;
    const float* weight;
    float* out;
    int64_t ld;
    bool fresh;  // out holds nothing yet, and every index comes once
  };

  // Rows of prepared activations are then those of entries, in expert order, and not of tokens.
  bool ordered() const { return a_.input_orders != nullptr; }
  const uint8_t* blob_of(int64_t expert) const;
  static PackedMatrix matrix_in(const ExpertMatrix& m, const uint8_t* blob);
  // Where tile pairs from `pair` on begin; where the matrix ends if past that.
  static const uint8_t* pair_of(const PackedMatrix& m, int64_t pair);
  void run_pair(Worker& worker, const PackedMatrix& m, const Span& span, int64_t pair,
                const TileRun& run, const Activations& act, float* out) const;
  void down(Worker& worker, Slice chosen, int64_t pair, int64_t end, const Target& target) const;
  const Activations& gate_input() const {
    return like_ != nullptr ? like_->gate_input() : x_->view();
  }
  const Activations& up_input() const { return x_up_ != nullptr ? x_up_->view() : gate_input(); }

  ExpertArgs a_;
  const ExpertGroup* like_;
  std::unique_ptr<ActivationBuffer> x_, x_up_;  // null where another one serves
  ActivationBuffer h_;
  std::vector<int32_t> token_;  // of each entry, in expert order
  std::vector<int32_t> slot_;   // and its place in ids
  std::vector<float> weight_;
  std::vector<int32_t> next_;
  std::vector<Span> spans_;
  std::vector<int32_t> all_;
};

}  // namespace moestro

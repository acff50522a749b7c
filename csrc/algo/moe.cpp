// One call per layer on the resident team, three phases:
//   1. group (token, slot) pairs by expert, and quantize each token's activations once;
//   2. gate and up of 32 intermediate channels per step, activation function, re-quantization -> h;
//   3. down: a task owns output channels and walks the experts in ascending id, adding weight x
//   result
//      into the tokens' rows. So every sum has one order, with no atomics and no scratch per
//      expert.
// Each expert's kernel is chosen by its own token count. h rows are in expert order, so phase 3
// reads them in place. In phases 2 and 3 each NUMA node has its slice of the output channels:
// weights are read only locally, the small h is exchanged through shared memory, and no sum is
// split.
#include "algo/moe.h"

#include <algorithm>
#include <string>
#include <vector>

#include "algo/activations.h"
#include "isa/dispatch.h"

namespace moestro {
namespace {

constexpr int64_t kChunkTokens = 128;
constexpr int64_t kPairChannels = 2 * kTileChannels;
static_assert(kPairChannels == kBlockChannels, "a pair of tiles fills one activation block");
// Weight bytes per task: enough to stream, small enough to balance. More where many tokens share
// them: then a task is long by its arithmetic, and only its first bytes are waited for.
constexpr int64_t kTaskBytes = 256 * 1024;
constexpr int64_t kSharedTaskBytes = 1024 * 1024;
constexpr int64_t kSharedTokens = 3;
// From this many tokens on, output channels are summed in a compact copy, if it fits the scratch.
constexpr int64_t kCompactTokens = 16;
constexpr int64_t kCompactFloats =
    (int64_t{Worker::kScratchBytes} - kTileScratchBytes) / 4 - kChunkTokens * kPairChannels;

// Consecutive entries of the expert order that share an expert.
struct Span {
  const uint8_t* blob;
  int32_t expert;
  int32_t first;
  int32_t count;
};

// Weights that a worker reads in order: where they end, and where those it reads next begin.
struct Run {
  const uint8_t* end;
  const uint8_t* next;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class Moe final : public Op {
 public:
  Moe(const MoeArgs& args, Rows rows)
      : a_(args),
        rows_(rows),
        x_(args.gate.matrix, rows.capacity()),
        h_(args.down.matrix, rows.capacity() * args.top_k),
        token_(size_t(rows.capacity() * args.top_k)),
        weight_(token_.size()),
        next_(size_t(args.experts) + 1) {
    if (!share_activations(args.gate.matrix, args.up.matrix))
      x_up_ = std::make_unique<ActivationBuffer>(args.up.matrix, rows.capacity());
    spans_.reserve(size_t(args.experts) + token_.size() / size_t(kChunkTokens) + 1);
  }

  void run(Worker& worker) override {
    const int64_t tokens = rows_.get();
    worker.for_tasks(tokens + 1, [&](int64_t task) {
      if (task == 0) {
        group_by_expert(tokens);
      } else {
        quantize(task - 1);
      }
    });
    const auto spans = static_cast<int64_t>(spans_.size());
    const int64_t task_bytes =
        tokens * a_.top_k < kSharedTokens * spans ? kTaskBytes : kSharedTaskBytes;
    const Slice blocks = worker.slice(ceil_div(a_.gate.matrix.rows, kPairChannels));
    const int64_t step = per_task(blocks.size(), spans, worker.node_count(), task_bytes,
                                  2 * (a_.gate.matrix.stride() + a_.up.matrix.stride()));
    const int64_t ranges = ceil_div(blocks.size(), step);
    worker.for_node_tasks(spans * ranges, [&](int64_t task) {
      const int64_t first = blocks.first + task % ranges * step;
      gate_up(worker, spans_[size_t(task / ranges)], first, std::min(blocks.end, first + step));
    });
    const Slice pairs = worker.slice(ceil_div(a_.down.matrix.row_tiles(), 2));
    const int64_t width =
        per_task(pairs.size(), 1, worker.node_count(), task_bytes, 2 * a_.down.matrix.stride());
    worker.for_node_tasks(ceil_div(pairs.size(), width), [&](int64_t task) {
      const int64_t first = pairs.first + task * width;
      down(worker, tokens, first, std::min(pairs.end, first + width));
    });
  }

 private:
  // Steps per task: about task_bytes of weights, but at least six tasks per worker; tasks as equal
  // as they come. A node's slice may have no steps.
  static int64_t per_task(int64_t steps, int64_t copies, int workers, int64_t task_bytes,
                          int64_t bytes_per_step) {
    if (steps == 0) return 1;
    const int64_t by_bytes = std::max<int64_t>(1, task_bytes / bytes_per_step);
    const int64_t by_balance = std::max<int64_t>(1, steps * copies / (6 * workers));
    const int64_t most = std::min({by_bytes, by_balance, steps});
    return ceil_div(steps, ceil_div(steps, most));
  }

  void quantize(int64_t t) {
    const MatrixKernels& kernels = isa().matrix;
    const auto cols = static_cast<int>(a_.gate.matrix.cols);
    kernels.quantize(a_.x + t * cols, cols, x_.view(), t, 0);
    if (x_up_ != nullptr) kernels.quantize(a_.x + t * cols, cols, x_up_->view(), t, 0);
  }

  const uint8_t* blob_of(int64_t expert) const {
    if (a_.pointers[expert] == 0)
      throw invalid_request("expert " + std::to_string(expert) + " is not in memory");
    return reinterpret_cast<const uint8_t*>(a_.pointers[expert]);
  }

  // Counting sort of the live (token, slot) pairs by expert; within one, tokens ascend.
  void group_by_expert(int64_t tokens) {
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
  static const uint8_t* pair_bytes(const ExpertMatrix& m, const uint8_t* blob, int64_t pair) {
    return blob + m.offset + std::min(2 * pair, m.matrix.row_tiles()) * m.matrix.stride();
  }

  static TileJob pair_job(const ExpertMatrix& m, const uint8_t* blob, int64_t pair, const Run& run,
                          const Activations& act, int count, float* out, std::byte* scratch) {
    const int64_t n = 2 * pair;
    TileJob job{};
    job.tiles = static_cast<int>(std::min<int64_t>(2, m.matrix.row_tiles() - n));
    job.tile[0] = pair_bytes(m, blob, pair);
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

  // A span's expert's biases [experts, rows] from a channel on; null if there are none.
  static const float* bias_of(const float* biases, const Span& span, int64_t rows,
                              int64_t channel) {
    return biases == nullptr ? nullptr : biases + span.expert * rows + channel;
  }

  // One pair of gate or up tiles. Leaves rows of 32 floats even for a lone last tile.
  void run_pair(Worker& worker, const ExpertMatrix& m, const Span& span, int64_t pair,
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
  void gate_up(Worker& worker, const Span& span, int64_t block, int64_t end) {
    const auto gate_quantize = isa().matrix.gate_quantize[static_cast<int>(a_.activation)];
    const int64_t size = span.count * kPairChannels;
    auto* gate = reinterpret_cast<float*>(worker.scratch() + kTileScratchBytes);
    float* up = gate + kChunkTokens * kPairChannels;
    const Activations& up_act = x_up_ != nullptr ? x_up_->view() : x_.view();
    for (; block < end; block += kChunkTokens / span.count) {
      const int64_t blocks = std::min<int64_t>(end - block, kChunkTokens / span.count);
      const uint8_t* gate_end = pair_bytes(a_.gate, span.blob, block + blocks);
      const Run gates{gate_end, pair_bytes(a_.up, span.blob, block)};
      const Run ups{pair_bytes(a_.up, span.blob, block + blocks), gate_end};
      for (int64_t i = 0; i < blocks; ++i)
        run_pair(worker, a_.gate, span, block + i, gates, x_.view(), gate + i * size);
      for (int64_t i = 0; i < blocks; ++i)
        run_pair(worker, a_.up, span, block + i, ups, up_act, up + i * size);
      for (int64_t i = 0; i < blocks; ++i) {
        const int64_t channel = (block + i) * kPairChannels;
        const int64_t rows = a_.gate.matrix.rows;
        const GateBlock pair{.gate = gate + i * size,
                             .up = up + i * size,
                             .gate_bias = bias_of(a_.gate_bias, span, rows, channel),
                             .up_bias = bias_of(a_.up_bias, span, rows, channel),
                             .m = span.count,
                             .n = static_cast<int>(std::min(kPairChannels, rows - channel))};
        gate_quantize(pair, h_.view(), span.first, channel);
      }
    }
  }

  // Output channels of pairs [pair, pair_end) for all tokens. With many tokens they are summed in a
  // compact copy: rows of `out` lie a power of two apart in most models, where a few cache sets
  // would have to hold them all.
  void down(Worker& worker, int64_t tokens, int64_t pair, int64_t pair_end) {
    auto* result = reinterpret_cast<float*>(worker.scratch() + kTileScratchBytes);
    const int64_t hidden = a_.down.matrix.rows;
    const int64_t first = pair * kPairChannels;
    const int64_t live = std::min(hidden, pair_end * kPairChannels) - first;
    float* sums = a_.out + first;
    int64_t ld = hidden;
    const bool compact = tokens >= kCompactTokens && tokens * live <= kCompactFloats;
    if (compact) {
      sums = result + kChunkTokens * kPairChannels;
      ld = live;
      if (a_.accumulate) copy_rows(a_.out + first, hidden, sums, live, tokens, live);
    }
    if (!a_.accumulate)
      for (int64_t t = 0; t < tokens; ++t) std::fill_n(sums + t * ld, live, 0.0f);
    add_experts(worker, pair, pair_end, sums, ld, result);
    if (compact) copy_rows(sums, live, a_.out + first, hidden, tokens, live);
  }

  static void copy_rows(const float* from, int64_t from_ld, float* to, int64_t to_ld, int64_t rows,
                        int64_t n) {
    for (int64_t r = 0; r < rows; ++r) std::copy_n(from + r * from_ld, n, to + r * to_ld);
  }

  // sums[t] += weight * down(h) of every expert in ascending id; column 0 of sums is pair's first.
  void add_experts(Worker& worker, int64_t pair, int64_t pair_end, float* sums, int64_t ld,
                   float* result) {
    const MatrixKernels& kernels = isa().matrix;
    for (size_t s = 0; s < spans_.size(); ++s) {
      const Span& span = spans_[s];
      const uint8_t* end = pair_bytes(a_.down, span.blob, pair_end);
      const Run run{end,
                    s + 1 < spans_.size() ? pair_bytes(a_.down, spans_[s + 1].blob, pair) : end};
      const Activations act = h_.view().from(span.first);
      for (int64_t p = pair; p < pair_end; ++p) {
        const TileJob job =
            pair_job(a_.down, span.blob, p, run, act, span.count, result, worker.scratch());
        kernels.tiles[static_cast<int>(a_.down.matrix.kind)](job);
        const int64_t channel = p * kPairChannels;
        const int64_t width = job.tiles * kTileChannels;
        kernels.combine(result, width, span.count,
                        static_cast<int>(std::min(width, a_.down.matrix.rows - channel)),
                        bias_of(a_.down_bias, span, a_.down.matrix.rows, channel),
                        weight_.data() + span.first, token_.data() + span.first,
                        sums + channel - pair * kPairChannels, ld);
      }
    }
  }

  MoeArgs a_;
  Rows rows_;
  ActivationBuffer x_, h_;
  std::unique_ptr<ActivationBuffer> x_up_;
  std::vector<int32_t> token_;  // of each entry, in expert order
  std::vector<float> weight_;
  std::vector<int32_t> next_;
  std::vector<Span> spans_;
};

}  // namespace

Activation activation_named(const std::string& name) {
  static constexpr const char* kNames[] = {
#define MOESTRO_ACTIVATION(kind, name, gate) name,
#include "isa/activation.def"
#undef MOESTRO_ACTIVATION
  };
  std::string known;
  for (int i = 0; i < kActivationCount; ++i) {
    if (name == kNames[i]) return static_cast<Activation>(i);
    known += (i == 0 ? "" : ", ") + std::string(kNames[i]);
  }
  throw Error(ErrorKind::kUnsupportedOp,
              "moe: no kernel for activation " + name + "; known: " + known);
}

std::unique_ptr<Op> make_moe(const MoeArgs& args, Rows rows) {
  return std::make_unique<Moe>(args, rows);
}

}  // namespace moestro

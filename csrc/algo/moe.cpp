// One call per layer on the resident team, three phases:
//   1. group (token, slot) pairs by expert, and quantize each token's activations once (or, after
//      that, once for each of its experts where these want the channels in orders of their own);
//   2. gate and up of 32 intermediate channels per step, activation function, re-quantization -> h;
//   3. down: a task owns output channels and walks the experts in ascending id, those that every
//      token passes last, adding weight x result into the tokens' rows. So every sum has one order,
//      with no atomics and no scratch per expert.
// Each expert's kernel is chosen by its own token count. h rows are in expert order, so phase 3
// reads them in place. In phases 2 and 3 each NUMA node has its slice of the output channels:
// weights are read only locally, the small h is exchanged through shared memory, and no sum is
// split.
#include "algo/moe.h"

#include <algorithm>
#include <string>
#include <vector>

#include "algo/expert_group.h"

namespace moestro {
namespace {

// From this many tokens on, output channels are summed in a compact copy, if it fits the scratch.
constexpr int64_t kCompactTokens = 16;
// Sums of one task of down, which should stay in L2 beside the weights.
constexpr int64_t kSumsBytes = 384 * 1024;

class Moe final : public Op {
 public:
  Moe(const MoeArgs& args, Rows rows) : a_(args), rows_(rows) {
    for (const ExpertArgs& group : args.groups)
      groups_.push_back(std::make_unique<ExpertGroup>(
          group, rows.capacity(), groups_.empty() ? nullptr : groups_.front().get()));
    for (const ExpertArgs& group : args.groups) has_orders_ |= group.input_orders != nullptr;
  }

  void run(Worker& worker) override {
    const int64_t tokens = rows_.get();
    worker.for_tasks(tokens + 1, [&](int64_t task) {
      for (const auto& group : groups_) {
        if (task == 0) {
          group->group_by_expert(tokens);
        } else {
          group->quantize(a_.x, task - 1);
        }
      }
    });
    if (has_orders_) quantize_spans(worker);
    gate_up(worker);
    down(worker, tokens);
  }

 private:
  void quantize_spans(Worker& worker) {
    int64_t total = 0;
    for (const auto& group : groups_) total += group->ordered_spans();
    worker.for_tasks(total, [&](int64_t task) {
      size_t g = 0;
      for (; task >= groups_[g]->ordered_spans(); ++g) task -= groups_[g]->ordered_spans();
      groups_[g]->quantize_span(a_.x, task);
    });
  }

  // Phase 2 as one sequence of steps: all blocks of this node's slice, span by span, group by
  // group.
  void gate_up(Worker& worker) {
    Slice blocks[kMaxGroups];
    int64_t total = 0;
    for (size_t g = 0; g < groups_.size(); ++g) {
      blocks[g] = worker.slice(groups_[g]->blocks());
      total += groups_[g]->spans() * blocks[g].size();
    }
    worker.for_node_ranges(total, total, [&](int64_t first, int64_t end) {
      for (size_t g = 0; g < groups_.size() && end > 0; ++g) {
        const int64_t size = blocks[g].size(), steps = groups_[g]->spans() * size;
        for (int64_t step = std::max<int64_t>(first, 0); step < std::min(end, steps);) {
          const int64_t block = step % size, count = std::min(size - block, end - step);
          const int64_t at = blocks[g].first + block;
          groups_[g]->gate_up(worker, step / size, at, at + count);
          step += count;
        }
        first -= steps;
        end -= steps;
      }
    });
  }

  void down(Worker& worker, int64_t tokens) {
    const Slice pairs = worker.slice(ceil_div(a_.hidden, kPairChannels));
    const int64_t most = kSumsBytes / ((tokens + 1) * kPairChannels * int64_t{sizeof(float)});
    worker.for_node_ranges(pairs.size(), most, [&](int64_t first, int64_t end) {
      add_pairs(worker, tokens, pairs.first + first, pairs.first + end);
    });
  }

  // Output channels of pairs [pair, pair_end) for all tokens. With many tokens they are summed in a
  // compact copy: rows of `out` lie a power of two apart in most models, where a few cache sets
  // would have to hold them all.
  void add_pairs(Worker& worker, int64_t tokens, int64_t pair, int64_t pair_end) {
    const int64_t first = pair * kPairChannels;
    const int64_t live = std::min(a_.hidden, pair_end * kPairChannels) - first;
    float* sums = a_.out + first;
    int64_t ld = a_.hidden;
    const bool compact = tokens >= kCompactTokens && tokens * live <= kCompactFloats;
    if (compact) {
      sums = reinterpret_cast<float*>(worker.scratch() + kTileScratchBytes) +
             kChunkTokens * kPairChannels;
      ld = live;
      if (a_.accumulate) copy_rows(a_.out + first, a_.hidden, sums, live, tokens, live);
    }
    if (!a_.accumulate)
      for (int64_t t = 0; t < tokens; ++t) std::fill_n(sums + t * ld, live, 0.0f);
    for (const auto& group : groups_) group->add_experts(worker, pair, pair_end, sums, ld);
    if (compact) copy_rows(sums, live, a_.out + first, a_.hidden, tokens, live);
  }

  static void copy_rows(const float* from, int64_t from_ld, float* to, int64_t to_ld, int64_t rows,
                        int64_t n) {
    for (int64_t r = 0; r < rows; ++r) std::copy_n(from + r * from_ld, n, to + r * to_ld);
  }

  MoeArgs a_;
  Rows rows_;
  std::vector<std::unique_ptr<ExpertGroup>> groups_;
  bool has_orders_ = false;
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

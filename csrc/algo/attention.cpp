#include "algo/attention.h"

#include <algorithm>
#include <vector>

#include "isa/dispatch.h"

namespace moestro {
namespace {

// Tokens first..first+tokens-1 of a batch, all of one sequence, with all their heads. Every group
// of query heads that shares a kv head is one task, or as many as there are segments if split.
struct TokenBlock {
  int64_t first_token;
  int64_t first_segment;
  int64_t segments;
  int64_t cost;        // tokens x keys
  int64_t first_task;  // of the phase that attends
  int64_t partials;    // floats before this block's in the shared memory, if split
  int tokens;
  bool split;
};

// Scratch of one worker, in floats.
constexpr int64_t kPackedFloats = attention_packed_floats(kQueryRows, kMaxHeadDim);
constexpr int64_t kPartialFloats = Partial::floats(kQueryRows, kMaxHeadDim);
constexpr int64_t kWorkFloats = attention_work_floats(kQueryRows, kMaxHeadDim);
static_assert((kPackedFloats + kWorkFloats + 2 * kPartialFloats) * sizeof(float) <=
              Worker::kScratchBytes);

// A block is split over its segments if it alone is more than this part of a worker's share.
constexpr int64_t kSharesToSplit = 4;

class Attention final : public Op {
 public:
  Attention(const AttentionArgs& args, Rows rows) : a_(args), rows_(rows) {
    const int64_t group = a_.heads / a_.cache.kv_heads;
    const int64_t parts = (group + kQueryRows - 1) / kQueryRows;
    part_heads_ = (group + parts - 1) / parts;
    parts_ = (group + part_heads_ - 1) / part_heads_;
    lanes_ = a_.cache.kv_heads * parts_;
    blocks_.reserve(static_cast<size_t>(rows.capacity()));
    split_.reserve(static_cast<size_t>(rows.capacity()));
  }

  void run(Worker& worker) override {
    if (worker.lead()) plan(worker.count());
    worker.barrier();
    worker.for_tasks(tasks_, [&](int64_t task) { attend(worker, task); });
    if (!split_.empty())
      worker.for_tasks(static_cast<int64_t>(split_.size()) * lanes_,
                       [&](int64_t task) { join(worker, task); });
  }

 private:
  // Checks the batch and cuts it into tasks. Only what runs beside what depends on the number of
  // workers, never a result.
  void plan(int workers) {
    blocks_.clear();
    split_.clear();
    const int64_t rows = rows_.get();
    int64_t total = 0;
    for (int64_t t = 0; t < rows;) {
      const Run run = next_run("attention", a_.cache, a_.batch, t, rows);
      const int64_t position = a_.batch.positions[run.first];
      require_pages("attention", a_.cache, a_.batch, t,
                    std::max<int64_t>(0, position - a_.window + 1),
                    a_.batch.positions[run.end - 1]);
      total += add_blocks(run);
      t = run.end;
    }
    // The longest first: what is claimed last decides how long others wait at the barrier.
    std::sort(blocks_.begin(), blocks_.end(),
              [](const TokenBlock& x, const TokenBlock& y) { return x.cost > y.cost; });
    number_tasks(workers == 1 ? total : total / (workers * kSharesToSplit));
  }

  int64_t add_blocks(Run run) {
    const int64_t step = std::max<int64_t>(1, kQueryRows / part_heads_);
    int64_t total = 0;
    for (int64_t t = run.first; t < run.end; t += step) {
      TokenBlock block{};
      block.first_token = t;
      block.tokens = static_cast<int>(std::min(step, run.end - t));
      const QueryBlock q = queries(block, 0);
      block.first_segment = q.first_segment();
      block.segments = q.end_segment() - q.first_segment();
      block.cost = block.tokens * (q.last_key(block.tokens - 1) + 1 - q.first_key(0));
      total += block.cost;
      blocks_.push_back(block);
    }
    return total;
  }

  void number_tasks(int64_t split_above) {
    tasks_ = 0;
    int64_t partials = 0;
    for (TokenBlock& block : blocks_) {
      const int64_t floats = lanes_ * block.segments * partial_floats(block);
      const bool fits = (partials + floats) * static_cast<int64_t>(sizeof(float)) <=
                        static_cast<int64_t>(Worker::kSharedBytes);
      block.split = block.segments > 1 && block.cost > split_above && fits;
      block.first_task = tasks_;
      tasks_ += lanes_ * (block.split ? block.segments : 1);
      if (!block.split) continue;
      block.partials = partials;
      partials += floats;
      split_.push_back(&block);
    }
  }

  int64_t partial_floats(const TokenBlock& block) const {
    return Partial::padded(Partial::floats(block.tokens * static_cast<int>(part_heads_),
                                           static_cast<int>(a_.cache.head_dim)));
  }

  // The lane-th group of query heads: part `lane % parts_` of kv head `lane / parts_`.
  QueryBlock queries(const TokenBlock& block, int64_t lane) const {
    const int64_t group = a_.heads / a_.cache.kv_heads, from = lane % parts_ * part_heads_;
    const int64_t width = a_.heads * a_.cache.head_dim;
    const int64_t head = lane / parts_ * group + from;
    const int64_t at = block.first_token * width + head * a_.cache.head_dim;
    return {.q = a_.q + at,
            .out = a_.out + at,
            .sinks = a_.sinks == nullptr ? nullptr : a_.sinks + head,
            .token_stride = width,
            .position = a_.batch.positions[block.first_token],
            .window = a_.window,
            .tokens = block.tokens,
            .heads = static_cast<int>(std::min(part_heads_, group - from)),
            .scale = a_.scale,
            .softcap = a_.softcap};
  }

  Partial shared_partial(Worker& worker, const TokenBlock& block, int64_t lane, int64_t segment,
                         int rows) const {
    const int64_t index = lane * block.segments + (segment - block.first_segment);
    float* memory = reinterpret_cast<float*>(worker.shared());
    return Partial::at(memory + block.partials + index * partial_floats(block), rows);
  }

  void attend(Worker& worker, int64_t task) const {
    const AttentionKernels& kernels = isa().attention;
    const auto after = std::upper_bound(
        blocks_.begin(), blocks_.end(), task,
        [](int64_t value, const TokenBlock& block) { return value < block.first_task; });
    const TokenBlock& block = *(after - 1);
    const int64_t index = task - block.first_task, lane = index % lanes_;
    const int dim = static_cast<int>(a_.cache.head_dim);
    const QueryBlock q = queries(block, lane);
    const KvHead head = a_.cache.head(lane / parts_, a_.batch.pages_of(block.first_token));
    float* packed = reinterpret_cast<float*>(worker.scratch());
    float* work = packed + kPackedFloats;
    kernels.pack_queries(q, head, packed);
    if (block.split) {
      const int64_t segment = block.first_segment + index / lanes_;
      kernels.attend(q, head, segment, packed, work,
                     shared_partial(worker, block, lane, segment, q.rows()));
      return;
    }
    const Partial all = Partial::at(work + kWorkFloats, q.rows());
    const Partial next = Partial::at(work + kWorkFloats + kPartialFloats, q.rows());
    kernels.attend(q, head, block.first_segment, packed, work, all);
    for (int64_t s = 1; s < block.segments; ++s) {
      kernels.attend(q, head, block.first_segment + s, packed, work, next);
      kernels.merge(q, dim, block.first_segment + s, next, all);
    }
    kernels.finish(q, dim, all);
  }

  // Merges what the tasks of a split block left in the shared memory.
  void join(Worker& worker, int64_t task) const {
    const AttentionKernels& kernels = isa().attention;
    const TokenBlock& block = *split_[static_cast<size_t>(task / lanes_)];
    const int64_t lane = task % lanes_, first = block.first_segment;
    const int dim = static_cast<int>(a_.cache.head_dim);
    const QueryBlock q = queries(block, lane);
    const Partial all = shared_partial(worker, block, lane, first, q.rows());
    for (int64_t s = first + 1; s < first + block.segments; ++s)
      kernels.merge(q, dim, s, shared_partial(worker, block, lane, s, q.rows()), all);
    kernels.finish(q, dim, all);
  }

  AttentionArgs a_;
  Rows rows_;
  int64_t part_heads_;  // query heads of a task: those of a kv head, or an equal part of them
  int64_t parts_;       // tasks per kv head
  int64_t lanes_;       // tasks per token block
  std::vector<TokenBlock> blocks_;
  std::vector<const TokenBlock*> split_;
  int64_t tasks_ = 0;
};

}  // namespace

std::unique_ptr<Op> make_attention(const AttentionArgs& args, Rows rows) {
  return std::make_unique<Attention>(args, rows);
}

}  // namespace moestro

#include "algo/moe_phases.h"

#include <algorithm>

namespace moestro {
namespace {

// From this many tokens on, output channels are summed in a compact copy, if it fits the scratch.
constexpr int64_t kCompactTokens = 16;
// Sums of one task of down, which should stay in L2 beside the weights.
constexpr int64_t kSumsBytes = 384 * 1024;

void copy_rows(const float* from, int64_t from_ld, float* to, int64_t to_ld, int64_t rows,
               int64_t n) {
  for (int64_t r = 0; r < rows; ++r) std::copy_n(from + r * from_ld, n, to + r * to_ld);
}

}  // namespace

MoePhases::MoePhases(const MoeArgs& args, Rows rows) : a_(args), rows_(rows) {
  for (const ExpertArgs& group : args.groups)
    groups_.push_back(std::make_unique<ExpertGroup>(
        group, rows.capacity(), groups_.empty() ? nullptr : groups_.front().get()));
  for (const ExpertArgs& group : args.groups) has_orders_ |= group.input_orders != nullptr;
}

int64_t MoePhases::prepare(Worker& worker) {
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
  return tokens;
}

void MoePhases::quantize_spans(Worker& worker) {
  int64_t total = 0;
  for (const auto& group : groups_) total += group->ordered_spans();
  worker.for_tasks(total, [&](int64_t task) {
    size_t g = 0;
    for (; task >= groups_[g]->ordered_spans(); ++g) task -= groups_[g]->ordered_spans();
    groups_[g]->quantize_span(a_.x, task);
  });
}

// One sequence of steps: all blocks of this node's slice, span by span, group by group.
void MoePhases::gate_up(Worker& worker, const Spans& chosen) {
  Slice blocks[kMaxGroups];
  int64_t total = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    blocks[g] = worker.slice(groups_[g]->blocks());
    total += int64_t(chosen[g].size()) * blocks[g].size();
  }
  worker.for_node_ranges(total, total, [&](int64_t first, int64_t end) {
    for (size_t g = 0; g < groups_.size() && end > 0; ++g) {
      const int64_t size = blocks[g].size(), steps = int64_t(chosen[g].size()) * size;
      for (int64_t step = std::max<int64_t>(first, 0); step < std::min(end, steps);) {
        const int64_t block = step % size, count = std::min(size - block, end - step);
        const int64_t at = blocks[g].first + block;
        groups_[g]->gate_up(worker, chosen[g][size_t(step / size)], at, at + count);
        step += count;
      }
      first -= steps;
      end -= steps;
    }
  });
}

int64_t MoePhases::entries(const Ranges& chosen) const {
  int64_t count = 0;
  for (size_t g = 0; g < groups_.size(); ++g)
    for (int64_t s = chosen[g].first; s < chosen[g].end; ++s)
      count += groups_[g]->spans()[size_t(s)].count;
  return count;
}

// With many tokens output channels are summed in a compact copy: rows of `out` lie a power of two
// apart in most models, where a few cache sets would have to hold them all.
void MoePhases::down(Worker& worker, int64_t tokens, const Ranges& chosen, bool first) {
  const Slice pairs = worker.slice(ceil_div(a_.hidden, kPairChannels));
  const int64_t most = kSumsBytes / ((tokens + 1) * kPairChannels * int64_t{sizeof(float)});
  const bool compact = tokens >= kCompactTokens && entries(chosen) >= tokens;
  worker.for_node_ranges(pairs.size(), most, [&](int64_t begin, int64_t end) {
    add_pairs(worker, tokens, chosen, a_.accumulate || !first, compact, pairs.first + begin,
              pairs.first + end);
  });
}

void MoePhases::slots(Worker& worker, Slice chosen) {
  const Slice pairs = worker.slice(ceil_div(a_.hidden, kPairChannels));
  worker.for_node_ranges(pairs.size(), pairs.size(), [&](int64_t begin, int64_t end) {
    const int64_t pair = pairs.first + begin;
    groups_[0]->write_slots(worker, chosen, pair, pairs.first + end, a_.out + pair * kPairChannels,
                            a_.hidden);
  });
}

// Output channels of pairs [pair, pair_end) for all tokens.
void MoePhases::add_pairs(Worker& worker, int64_t tokens, const Ranges& chosen, bool accumulate,
                          bool compact, int64_t pair, int64_t pair_end) {
  const int64_t first = pair * kPairChannels;
  const int64_t live = std::min(a_.hidden, pair_end * kPairChannels) - first;
  float* sums = a_.out + first;
  int64_t ld = a_.hidden;
  compact = compact && tokens * live <= kCompactFloats;
  if (compact) {
    sums = reinterpret_cast<float*>(worker.scratch() + kTileScratchBytes) +
           kChunkTokens * kPairChannels;
    ld = live;
    if (accumulate) copy_rows(a_.out + first, a_.hidden, sums, live, tokens, live);
  }
  if (!accumulate)
    for (int64_t t = 0; t < tokens; ++t) std::fill_n(sums + t * ld, live, 0.0f);
  for (size_t g = 0; g < groups_.size(); ++g)
    groups_[g]->add_experts(worker, chosen[g], pair, pair_end, sums, ld);
  if (compact) copy_rows(sums, live, a_.out + first, a_.hidden, tokens, live);
}

}  // namespace moestro

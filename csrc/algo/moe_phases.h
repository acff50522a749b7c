// The phases of the MoE operator over any choice of experts, for the operators that differ in where
// experts are and when they come (see moe.cpp).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "algo/expert_group.h"
#include "algo/moe.h"

namespace moestro {

class MoePhases {
 public:
  // Of each group: any of its spans by index; a range of its spans.
  using Spans = std::array<std::span<const int32_t>, kMaxGroups>;
  using Ranges = std::array<Slice, kMaxGroups>;

  MoePhases(const MoeArgs& args, Rows rows);

  size_t groups() const { return groups_.size(); }
  ExpertGroup& group(size_t index) { return *groups_[index]; }

  // All workers call each of these; each ends with a barrier.
  // Phase 1; returns the number of tokens.
  int64_t prepare(Worker& worker);
  // Phase 2 of the chosen spans.
  void gate_up(Worker& worker, const Spans& chosen);
  // Phase 3 of the chosen spans. `first`: `out` holds nothing yet but what MoeArgs::accumulate
  // says. Every channel of `out` is summed by ascending calls as by a single one.
  void down(Worker& worker, int64_t tokens, const Ranges& chosen, bool first);
  // Phase 3 without sums: `out` is [T, top_k, hidden], and each chosen span of the only group
  // writes down into the slots that chose its expert.
  void slots(Worker& worker, Slice chosen);

 private:
  void add_pairs(Worker& worker, int64_t tokens, const Ranges& chosen, bool accumulate,
                 bool compact, int64_t pair, int64_t pair_end);
  void quantize_spans(Worker& worker);
  int64_t entries(const Ranges& chosen) const;

  MoeArgs a_;
  Rows rows_;
  std::vector<std::unique_ptr<ExpertGroup>> groups_;
  bool has_orders_ = false;
};

}  // namespace moestro

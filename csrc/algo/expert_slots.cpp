#include "algo/expert_slots.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "algo/expert_group.h"
#include "algo/moe_phases.h"
#include "isa/dispatch.h"

namespace moestro {
namespace {

// Channels of one task of a sum.
constexpr int64_t kSumChannels = 512;

class MoeSlots final : public Op {
 public:
  MoeSlots(const MoeArgs& args, Rows rows) : phases_(args, rows) {}

  void run(Worker& worker) override {
    phases_.prepare(worker);
    MoePhases::Spans spans;
    spans[0] = phases_.group(0).all();
    phases_.gate_up(worker, spans);
    phases_.slots(worker, {0, int64_t(spans[0].size())});
  }

 private:
  MoePhases phases_;
};

class CombineExperts final : public Op {
 public:
  CombineExperts(const CombineArgs& args, Rows rows)
      : a_(args), rows_(rows), order_(size_t(rows.capacity() * args.top_k)) {}

  void run(Worker& worker) override {
    const int64_t tokens = rows_.get();
    worker.for_tasks(tokens, [&](int64_t token) { sort_slots(token); });
    const int64_t parts = ceil_div(a_.hidden, kSumChannels);
    worker.for_tasks(tokens * parts,
                     [&](int64_t task) { add_slots(task / parts, task % parts * kSumChannels); });
  }

 private:
  // By expert; a token's slots of the same one stay in their order.
  void sort_slots(int64_t token) {
    int32_t* order = order_.data() + token * a_.top_k;
    std::iota(order, order + a_.top_k, 0);
    const int32_t* ids = a_.ids + token * a_.top_k;
    std::stable_sort(order, order + a_.top_k,
                     [&](int32_t a, int32_t b) { return ids[a] < ids[b]; });
  }

  void add_slots(int64_t token, int64_t channel) const {
    const int64_t n = std::min(kSumChannels, a_.hidden - channel);
    float* out = a_.out + token * a_.hidden + channel;
    if (!a_.accumulate) std::fill_n(out, n, 0.0f);
    constexpr int32_t kFirstRow = 0;
    for (int64_t i = 0; i < a_.top_k; ++i) {
      const int64_t slot = token * a_.top_k + order_[size_t(token * a_.top_k + i)];
      if (a_.ids[slot] < 0) continue;
      isa().matrix.combine(a_.y + slot * a_.hidden + channel, n, 1, static_cast<int>(n), nullptr,
                           a_.weights + slot, &kFirstRow, out, a_.hidden);
    }
  }

  CombineArgs a_;
  Rows rows_;
  std::vector<int32_t> order_;  // [T, top_k]
};

class CopySlots final : public Op {
 public:
  CopySlots(const CopySlotsArgs& args, Rows rows) : a_(args), rows_(rows) {}

  void run(Worker& worker) override {
    worker.for_tasks(rows_.get() * a_.top_k, [&](int64_t slot) {
      const int32_t id = a_.ids[slot];
      if (id >= a_.experts)
        throw invalid_request("expert id " + std::to_string(id) + " is not below " +
                              std::to_string(a_.experts));
      if (id < 0 || a_.pointers[id] == 0) return;
      std::copy_n(a_.from + slot * a_.hidden, a_.hidden, a_.to + slot * a_.hidden);
    });
  }

 private:
  CopySlotsArgs a_;
  Rows rows_;
};

class CopyRows final : public Op {
 public:
  CopyRows(const CopyRowsArgs& args, Rows rows) : a_(args), rows_(rows) {}

  void run(Worker& worker) override {
    worker.for_tasks(rows_.get(), [&](int64_t row) {
      std::memcpy(a_.out + row * a_.width, a_.x + row * a_.width, size_t(a_.width));
    });
  }

 private:
  CopyRowsArgs a_;
  Rows rows_;
};

}  // namespace

std::unique_ptr<Op> make_moe_slots(const MoeArgs& args, Rows rows) {
  MoeArgs skipping = args;
  skipping.groups[0].skip_absent = true;
  return std::make_unique<MoeSlots>(skipping, rows);
}

std::unique_ptr<Op> make_combine_experts(const CombineArgs& args, Rows rows) {
  return std::make_unique<CombineExperts>(args, rows);
}

std::unique_ptr<Op> make_copy_slots(const CopySlotsArgs& args, Rows rows) {
  return std::make_unique<CopySlots>(args, rows);
}

std::unique_ptr<Op> make_copy_rows(const CopyRowsArgs& args, Rows rows) {
  return std::make_unique<CopyRows>(args, rows);
}

}  // namespace moestro

#include "algo/streamed_moe.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "algo/moe_phases.h"
#include "core/pause.h"

namespace moestro {
namespace {

// A worker looks this often for the next round before it sleeps: about as long as waking it takes.
constexpr int kSpinsBeforeSleep = 1000;

// What all workers compute between two looks at the reads.
struct Round {
  std::vector<int32_t> gate_up;  // spans of the routed experts
  bool shared;                   // gate and up of the shared experts too
  bool down;
  MoePhases::Ranges range;
  bool first_down;
  bool last;
};

class StreamedMoe final : public Op {
 public:
  StreamedMoe(const MoeArgs& args, Rows rows, std::shared_ptr<ExpertCache> cache)
      : phases_(args, rows), cache_(std::move(cache)) {}

  void run(Worker& worker) override {
    // Nobody ends a round of this run before all have read this.
    uint32_t seen = announced_.load(std::memory_order_relaxed);
    if (worker.lead()) failed_ = false;
    const int64_t tokens = phases_.prepare(worker);
    const Chunk chunk(worker.lead() ? cache_.get() : nullptr);
    if (worker.lead()) rounds_begun_ = 0;
    for (uint32_t index = 0;; ++index) {
      // Two rounds take turns: whoever is late still reads the one before.
      Round& round = rounds_[index % 2];
      if (worker.lead()) {
        announce(round, tokens);
      } else {
        await(seen);
        if (failed_) worker.barrier();  // which the failure of the lead releases
      }
      ++seen;
      if (!round.gate_up.empty() || round.shared) gate_up(worker, round);
      if (round.down) phases_.down(worker, tokens, round.range, round.first_down);
      if (round.last) break;
    }
  }

 private:
  // However a run ends, nothing is in flight afterwards.
  struct Chunk {
    ExpertCache* cache;
    explicit Chunk(ExpertCache* cache) : cache(cache) {}
    Chunk(const Chunk&) = delete;
    Chunk& operator=(const Chunk&) = delete;
    ~Chunk() {
      if (cache != nullptr) cache->end();
    }
  };

  // The lead decides the next round; the others compute it.
  void announce(Round& round, int64_t tokens) {
    try {
      if (rounds_begun_++ == 0) begin(tokens);
      decide(round);
    } catch (...) {
      failed_ = true;
      wake();
      throw;
    }
    wake();
  }

  void wake() {
    announced_.fetch_add(1, std::memory_order_release);
    announced_.notify_all();
  }

  void await(uint32_t seen) const {
    for (int spins = 0; spins < kSpinsBeforeSleep; ++spins) {
      if (announced_.load(std::memory_order_acquire) != seen) return;
      pause();
    }
    announced_.wait(seen, std::memory_order_acquire);
  }

  // Which experts the chunk needs, and their spans.
  void begin(int64_t tokens) {
    wanted_.clear();
    first_span_.clear();
    const auto& spans = phases_.group(0).spans();
    for (size_t s = 0; s < spans.size(); ++s) {
      if (wanted_.empty() || wanted_.back().expert != spans[s].expert) {
        wanted_.push_back({.expert = spans[s].expert, .count = 0});
        first_span_.push_back(int32_t(s));
      }
      wanted_.back().count += spans[s].count;
    }
    first_span_.push_back(int32_t(spans.size()));
    computed_.assign(wanted_.size(), false);
    prefix_ = added_ = 0;
    cache_->begin(wanted_, tokens);
  }

  void decide(Round& round) {
    const auto needed = int64_t(wanted_.size());
    round = {.gate_up = std::move(round.gate_up),
             .shared = rounds_begun_ == 1 && phases_.groups() > 1,
             .down = false,
             .range = {},
             .first_down = added_ == 0,
             .last = false};
    round.gate_up.clear();
    for (;;) {
      cache_->finish(added_);
      cache_->submit();
      for (const int32_t position : cache_->ready()) choose(round, position);
      while (prefix_ < needed && computed_[size_t(prefix_)]) ++prefix_;
      if (!round.gate_up.empty() || round.shared || prefix_ > added_ || prefix_ == needed) break;
      cache_->wait();
    }
    // Reads that came fill the queue again before the round is computed.
    cache_->submit();
    round.last = prefix_ == needed;
    const bool idle = round.gate_up.empty() && !round.shared;
    if (!round.last && !(prefix_ > added_ && (idle || cache_->blocked()))) return;
    round.down = true;
    round.range[0] = {first_span_[size_t(added_)], first_span_[size_t(prefix_)]};
    if (round.last && phases_.groups() > 1)
      round.range[1] = {0, int64_t(phases_.group(1).spans().size())};
    added_ = prefix_;
  }

  void choose(Round& round, int32_t position) {
    computed_[size_t(position)] = true;
    for (int32_t s = first_span_[size_t(position)]; s < first_span_[size_t(position) + 1]; ++s) {
      phases_.group(0).place(s, cache_->blob(position));
      round.gate_up.push_back(s);
    }
  }

  void gate_up(Worker& worker, const Round& round) {
    MoePhases::Spans chosen;
    chosen[0] = round.gate_up;
    if (round.shared) chosen[1] = phases_.group(1).all();
    phases_.gate_up(worker, chosen);
  }

  MoePhases phases_;
  const std::shared_ptr<ExpertCache> cache_;
  std::atomic<uint32_t> announced_{0};  // rounds, of all runs
  bool failed_ = false;
  Round rounds_[2]{};
  // The lead's own.
  uint32_t rounds_begun_ = 0;
  std::vector<Wanted> wanted_;
  std::vector<int32_t> first_span_;  // of each wanted expert, and the number of spans
  std::vector<bool> computed_;       // gate and up, by the end of the round
  int64_t prefix_ = 0;               // leading experts that are computed
  int64_t added_ = 0;                // and those whose down is added by the end of the round
};

}  // namespace

std::unique_ptr<Op> make_streamed_moe(const MoeArgs& args, Rows rows,
                                      std::shared_ptr<ExpertCache> cache) {
  return std::make_unique<StreamedMoe>(args, rows, std::move(cache));
}

}  // namespace moestro

#include "algo/latent_attention.h"

#include <algorithm>
#include <vector>

#include "algo/checks.h"
#include "isa/dispatch.h"

namespace moestro {
namespace {

class WriteLatent final : public Op {
 public:
  WriteLatent(const WriteLatentArgs& args, Rows rows) : a_(args), rows_(rows) {}

  void run(Worker& worker) override {
    const int64_t rows = rows_.get(), half = (a_.cache.width - a_.cache.rank) / 2;
    require_writable("write_latent", a_.cache, a_.batch, rows);
    require_indices("write_latent: position", a_.batch.positions, rows, a_.max_positions);
    const LatentKernels& kernels = isa().vectors->latent;
    worker.for_tasks(rows, [&](int64_t t) {
      const int64_t position = a_.batch.positions[t];
      const LatentRow row{.kv = a_.kv + t * a_.cache.width,
                          .norm = a_.norm,
                          .cos = a_.cos + position * half,
                          .sin = a_.sin + position * half,
                          .eps = a_.eps,
                          .interleaved = a_.interleaved};
      kernels.store(a_.cache.of(a_.batch.pages_of(t)), position, row);
    });
  }

 private:
  WriteLatentArgs a_;
  Rows rows_;
};

// Scratch of one worker, in floats.
constexpr int64_t kPackedFloats = int64_t{kMaxLatentWidth} * kLatentTokens * kHeadLanes;
constexpr int64_t kWorkFloats = latent_work_floats(kLatentTokens, kMaxLatentWidth);
constexpr int64_t kPartialFloats = int64_t{kLatentTokens} * kHeadLanes * (2 + kMaxLatentRank);
static_assert((kPackedFloats + kWorkFloats + 2 * kPartialFloats) * sizeof(float) <=
              Worker::kScratchBytes);

// Tasks per worker that are wanted before a task is made smaller.
constexpr int64_t kTasksPerWorker = 4;

// Tokens first..first+tokens-1 of a batch, all of one sequence, with up to sixteen heads from
// `head` on.
struct Walk {
  int64_t token;
  int64_t head;
  int64_t first_unit;  // of its segments among those of all walks
  int64_t segments;
  int tokens;
};

class LatentAttention final : public Op {
 public:
  LatentAttention(const LatentAttentionArgs& args, Rows rows) : a_(args), rows_(rows) {
    const int64_t groups = (args.heads + kHeadLanes - 1) / kHeadLanes;
    walks_.reserve(static_cast<size_t>(rows.capacity() * groups));
  }

  void run(Worker& worker) override {
    if (worker.lead()) plan(worker.count());
    worker.barrier();
    const auto walks = static_cast<int64_t>(walks_.size());
    if (wave_ == 0) {
      worker.for_tasks(walks, [&](int64_t w) { walk(worker, walks_[static_cast<size_t>(w)]); });
      return;
    }
    for (int64_t first = 0; first < units_; first += wave_) {
      const int64_t end = std::min(units_, first + wave_);
      worker.for_tasks(end - first, [&](int64_t i) { attend_unit(worker, first + i, i); });
      worker.for_tasks(walks, [&](int64_t w) { join(worker, w, first, end); });
    }
  }

 private:
  // Checks the batch and cuts it into walks. Only what runs beside what depends on the number of
  // workers, never a result.
  void plan(int workers) {
    const int64_t rows = rows_.get();
    int step = kLatentTokens;
    for (cut(rows, step); step > 1 && enough(workers) > walk_count(); cut(rows, step)) step /= 2;
    wave_ = 0;
    if (workers == 1 || walk_count() >= enough(workers) || units_ == walk_count()) return;
    // Every walk keeps its sum in the shared memory; segments fill the rest, wave by wave.
    partial_ = LatentPartial::floats(step, a_.cache.rank);
    const int64_t room = static_cast<int64_t>(Worker::kSharedBytes / sizeof(float)) / partial_;
    if (room - walk_count() >= workers) wave_ = room - walk_count();
  }

  static int64_t enough(int workers) { return workers == 1 ? 0 : workers * kTasksPerWorker; }
  int64_t walk_count() const { return static_cast<int64_t>(walks_.size()); }

  void cut(int64_t rows, int step) {
    walks_.clear();
    units_ = 0;
    for (int64_t t = 0; t < rows;) {
      const Run run = next_run("latent_attention", a_.cache, a_.batch, t, rows);
      require_pages("latent_attention", a_.cache, a_.batch, t, 0, a_.batch.positions[run.end - 1]);
      // Of a long prompt the last tokens see most: they come first, or others wait for them.
      for (int64_t end = run.end; end > run.first;) {
        const int64_t first = std::max(run.first, end - step);
        for (int64_t head = 0; head < a_.heads; head += kHeadLanes) {
          Walk walk{.token = first,
                    .head = head,
                    .first_unit = units_,
                    .segments = 0,
                    .tokens = static_cast<int>(end - first)};
          walk.segments = queries(walk).segments();
          units_ += walk.segments;
          walks_.push_back(walk);
        }
        end = first;
      }
      t = run.end;
    }
  }

  LatentQueries queries(const Walk& walk) const {
    const int64_t rope = a_.cache.width - a_.cache.rank;
    const int64_t at = (walk.token * a_.heads + walk.head) * a_.cache.rank;
    return {.absorbed = a_.absorbed + at,
            .rotated = a_.q + (walk.token * a_.heads + walk.head + 1) * a_.q_width - rope,
            .out = a_.out + at,
            .absorbed_token = a_.heads * a_.cache.rank,
            .rotated_token = a_.heads * a_.q_width,
            .rotated_head = a_.q_width,
            .position = a_.batch.positions[walk.token],
            .tokens = walk.tokens,
            .heads = static_cast<int>(std::min<int64_t>(kHeadLanes, a_.heads - walk.head)),
            .scale = a_.scale};
  }

  void walk(Worker& worker, const Walk& walk) const {
    const LatentKernels& kernels = isa().vectors->latent;
    const LatentQueries q = queries(walk);
    const LatentCache cache = a_.cache.of(a_.batch.pages_of(walk.token));
    float* packed = reinterpret_cast<float*>(worker.scratch());
    float* work = packed + kPackedFloats;
    const LatentPartial all = LatentPartial::at(work + kWorkFloats, walk.tokens);
    const LatentPartial next = LatentPartial::at(work + kWorkFloats + kPartialFloats, walk.tokens);
    kernels.pack(q, cache, packed);
    for (int64_t s = 0; s < walk.segments; ++s) {
      kernels.attend(q, cache, s, packed, work, s == 0 ? all : next);
      if (s > 0) kernels.merge(q, cache.rank, s, next, all);
    }
    kernels.finish(q, cache.rank, all);
  }

  LatentPartial shared(Worker& worker, int64_t index, int tokens) const {
    return LatentPartial::at(reinterpret_cast<float*>(worker.shared()) + index * partial_, tokens);
  }

  // One segment of one walk, left in the shared memory as number `place` of its wave.
  void attend_unit(Worker& worker, int64_t unit, int64_t place) const {
    const auto after =
        std::upper_bound(walks_.begin(), walks_.end(), unit,
                         [](int64_t value, const Walk& walk) { return value < walk.first_unit; });
    const Walk& walk = *(after - 1);
    const LatentKernels& kernels = isa().vectors->latent;
    const LatentQueries q = queries(walk);
    const LatentCache cache = a_.cache.of(a_.batch.pages_of(walk.token));
    float* packed = reinterpret_cast<float*>(worker.scratch());
    kernels.pack(q, cache, packed);
    kernels.attend(q, cache, unit - walk.first_unit, packed, packed + kPackedFloats,
                   shared(worker, walk_count() + place, walk.tokens));
  }

  // Merges a walk's segments of the wave of units first..end-1, and finishes it after its last.
  void join(Worker& worker, int64_t index, int64_t first, int64_t end) const {
    const LatentKernels& kernels = isa().vectors->latent;
    const Walk& walk = walks_[static_cast<size_t>(index)];
    const int64_t end_unit = walk.first_unit + walk.segments;
    const LatentQueries q = queries(walk);
    const int rank = static_cast<int>(a_.cache.rank);
    const LatentPartial all = shared(worker, index, walk.tokens);
    const int64_t stop = std::min(end, end_unit);
    for (int64_t unit = std::max(first, walk.first_unit); unit < stop; ++unit)
      kernels.merge(q, rank, unit - walk.first_unit,
                    shared(worker, walk_count() + unit - first, walk.tokens), all);
    if (first < end_unit && end_unit <= end) kernels.finish(q, rank, all);
  }

  LatentAttentionArgs a_;
  Rows rows_;
  std::vector<Walk> walks_;
  int64_t units_ = 0;    // segments of all walks
  int64_t wave_ = 0;     // units computed before they are merged; 0: every walk goes alone
  int64_t partial_ = 0;  // floats of one partial in the shared memory
};

}  // namespace

std::unique_ptr<Op> make_write_latent(const WriteLatentArgs& args, Rows rows) {
  return std::make_unique<WriteLatent>(args, rows);
}

std::unique_ptr<Op> make_latent_attention(const LatentAttentionArgs& args, Rows rows) {
  return std::make_unique<LatentAttention>(args, rows);
}

}  // namespace moestro

#include "algo/linear_heads.h"

#include <algorithm>
#include <cstring>

#include "algo/tile_job.h"
#include "isa/dispatch.h"

namespace moestro {
namespace {

// Tokens of a task: a head's matrix is small, so it is read from the cache for each of them.
constexpr int64_t kTokens = 32;
constexpr int64_t kTileRows = 2 * kTileChannels;

// Scratch of one worker: of the tile products, prepared activations, one pair of row tiles.
constexpr int64_t kActivationBytes = kTokens * kMaxHeadInputs * int64_t{sizeof(float)};
constexpr int64_t kOutBytes = kTokens * kTileRows * int64_t{sizeof(float)};
static_assert(kTileScratchBytes + kActivationBytes + kOutBytes <=
              static_cast<int64_t>(Worker::kScratchBytes));

class LinearHeads final : public Op {
 public:
  LinearHeads(const LinearHeadsArgs& args, Rows rows)
      : a_(args), rows_(rows), channels_(args.weight.rows / args.heads) {}

  void run(Worker& worker) override {
    const int64_t tokens = rows_.get(), chunks = (tokens + kTokens - 1) / kTokens;
    worker.for_tasks(chunks * a_.heads, [&](int64_t task) {
      const int64_t first = task % chunks * kTokens;
      multiply(worker, task / chunks, first, std::min(kTokens, tokens - first));
    });
  }

 private:
  void multiply(Worker& worker, int64_t head, int64_t token, int64_t tokens) const {
    const MatrixKernels& kernels = isa().matrix;
    const bool is_float = layout_facts(a_.weight.kind).is_float;
    std::byte* act = worker.scratch() + kTileScratchBytes;
    auto* out = reinterpret_cast<float*>(act + kActivationBytes);
    const Activations view{.kind = a_.weight.kind,
                           .blocks = a_.weight.blocks(),
                           .x = is_float ? reinterpret_cast<float*>(act) : nullptr,
                           .packed = is_float ? nullptr : reinterpret_cast<ActivationBlock*>(act)};
    for (int64_t i = 0; i < tokens; ++i)
      kernels.quantize(a_.x + ((token + i) * a_.heads + head) * a_.x_width,
                       static_cast<int>(a_.weight.cols), view, i, 0);
    const int64_t tiles = channels_ / kTileChannels, first = head * tiles;
    for (int64_t tile = 0; tile < tiles; tile += 2) {
      const TileJob job = tile_job(a_.weight, first + tile, first + tiles, whole_run(a_.weight),
                                   view, tokens, out, worker.scratch());
      kernels.tiles[static_cast<int>(a_.weight.kind)](job);
      const int64_t width = job.tiles * kTileChannels;
      for (int64_t i = 0; i < tokens; ++i)
        std::memcpy(a_.out + ((token + i) * a_.heads + head) * channels_ + tile * kTileChannels,
                    out + i * width, static_cast<size_t>(width) * sizeof(float));
    }
  }

  LinearHeadsArgs a_;
  Rows rows_;
  int64_t channels_;  // outputs of a head
};

}  // namespace

std::unique_ptr<Op> make_linear_heads(const LinearHeadsArgs& args, Rows rows) {
  return std::make_unique<LinearHeads>(args, rows);
}

}  // namespace moestro

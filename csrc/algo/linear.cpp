#include "algo/linear.h"

#include <algorithm>

#include "algo/activations.h"
#include "algo/tile_job.h"
#include "isa/dispatch.h"

namespace moestro {
namespace {

// Tokens per task: their activations stay in L2 while a task's tiles pass by.
constexpr int64_t kChunkTokens = 128;

class Linear final : public Op {
 public:
  Linear(const LinearArgs& args, Rows rows)
      : a_(args), rows_(rows), act_(args.weight, rows.capacity()) {}

  void run(Worker& worker) override {
    const int64_t tokens = rows_.get();
    worker.for_tasks(tokens, [&](int64_t t) {
      prepare_row(a_.x + t * a_.weight.cols, a_.input_order, a_.weight.cols, act_.view(), t);
    });
    const int64_t chunks = (tokens + kChunkTokens - 1) / kChunkTokens;
    const Slice pairs = worker.slice((a_.weight.row_tiles() + 1) / 2);
    const int64_t size = pairs.size();
    worker.for_node_ranges(chunks * size, chunks * size, [&](int64_t first, int64_t end) {
      while (first < end) {
        const int64_t pair = first % size;
        const int64_t count = std::min(size - pair, end - first);
        multiply(worker, first / size * kChunkTokens, tokens, pairs.first + pair,
                 pairs.first + pair + count);
        first += count;
      }
    });
  }

 private:
  void multiply(Worker& worker, int64_t token, int64_t tokens, int64_t pair, int64_t pair_end) {
    const MatrixKernels& kernels = isa().matrix;
    const auto tiles = kernels.tiles[static_cast<int>(a_.weight.kind)];
    int32_t index[kChunkTokens];
    const int m = static_cast<int>(std::min(kChunkTokens, tokens - token));
    for (int i = 0; i < m; ++i) index[i] = static_cast<int32_t>(token + i);
    auto* out = reinterpret_cast<float*>(worker.scratch() + kTileScratchBytes);
    for (; pair < pair_end; ++pair) {
      const int64_t n = 2 * pair;
      TileJob job = tile_job(a_.weight, n, a_.weight.row_tiles(), whole_run(a_.weight), act_.view(),
                             m, out, worker.scratch());
      job.rows = index;
      tiles(job);
      store(out, job.tiles * kTileChannels, index, m, n * kTileChannels);
    }
  }

  void store(const float* from, int width, const int32_t* index, int m, int64_t channel) const {
    const int64_t n = std::min<int64_t>(width, a_.weight.rows - channel);
    for (int i = 0; i < m; ++i, from += width) {
      float* to = a_.out + index[i] * a_.weight.rows + channel;
      if (a_.bias == nullptr && !a_.accumulate) {
        std::copy_n(from, n, to);
        continue;
      }
      for (int64_t c = 0; c < n; ++c) {
        const float value = a_.bias == nullptr ? from[c] : from[c] + a_.bias[channel + c];
        to[c] = a_.accumulate ? to[c] + value : value;
      }
    }
  }

  LinearArgs a_;
  Rows rows_;
  ActivationBuffer act_;
};

class Embed final : public Op {
 public:
  Embed(const EmbedArgs& args, Rows rows) : a_(args), rows_(rows) {}

  void run(Worker& worker) override {
    worker.for_tasks(rows_.get(), [&](int64_t t) {
      const int32_t id = a_.ids[t];
      if (id < 0 || id >= a_.weight.rows)
        throw invalid_request("token id " + std::to_string(id) + " at row " + std::to_string(t) +
                              " is outside the vocabulary of " + std::to_string(a_.weight.rows));
      decode_row(a_.weight, id, a_.out + t * a_.weight.cols);
    });
  }

 private:
  EmbedArgs a_;
  Rows rows_;
};

}  // namespace

std::unique_ptr<Op> make_linear(const LinearArgs& args, Rows rows) {
  return std::make_unique<Linear>(args, rows);
}

std::unique_ptr<Op> make_embed(const EmbedArgs& args, Rows rows) {
  return std::make_unique<Embed>(args, rows);
}

}  // namespace moestro

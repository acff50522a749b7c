#include "algo/quantize.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <vector>

#include "core/error.h"
#include "core/team.h"
#include "isa/dispatch.h"

namespace moestro {
namespace {

// Columns that one task quantizes of 16 rows, in whole groups.
constexpr int64_t kTaskCols = 2048;
constexpr float kLargestHalf = 65504.0f, kLargestBf16 = 0x1.fep127f;

int64_t element_nbytes(FloatType type) { return type == FloatType::kF32 ? 4 : 2; }

std::string four_digits(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value);
  return text;
}

// What the largest code (or the format itself, if float) stands for, in messages.
std::string beyond(FormatKind kind, float largest) {
  const LayoutFacts& facts = layout_facts(kind);
  const std::string weights = "weights up to " + four_digits(largest);
  if (facts.is_float) {
    const float limit = kind == FormatKind::kF16 ? kLargestHalf : kLargestBf16;
    return weights + " exceed the range of " + facts.stem + " (largest " + four_digits(limit) +
           "); use a wider format";
  }
  const int codes = facts.zero != 0 ? facts.zero : (1 << facts.bits) - 1;
  return weights + " need a scale beyond float16 (largest 65504 x " + std::to_string(codes) +
         "); keep this tensor in a float format";
}

// One worker's memory: a group's values and codes by lane.
class Buffers {
 public:
  Buffers(Worker& worker, int64_t group) {
    const size_t floats = size_t(2 * group * kTileChannels);
    float* base = reinterpret_cast<float*>(worker.scratch());
    if (floats * sizeof(float) > Worker::kScratchBytes) {
      owned_.resize(floats);
      base = owned_.data();
    }
    x = base;
    codes = base + floats / 2;
  }
  float* x;
  float* codes;

 private:
  std::vector<float> owned_;
};

class Quantizer {
 public:
  explicit Quantizer(const QuantizeArgs& args)
      : args_(args),
        group_(args.matrix.tile_blocks * kBlockChannels),
        groups_(args.matrix.padded_cols / group_),
        chunk_(std::max<int64_t>(1, kTaskCols / group_)),
        chunks_((groups_ + chunk_ - 1) / chunk_),
        losses_(size_t(args.matrix.row_tiles() * chunks_)) {}

  QuantizeLoss run() {
    const PackKernels& kernels = isa().pack;
    run_on_team([&](Worker& worker) {
      const Buffers buffers(worker, group_);
      worker.for_tasks(int64_t(losses_.size()), [&](int64_t task) {
        const int64_t row_tile = task / chunks_, first = task % chunks_ * chunk_;
        for (int64_t g = first; g < std::min(first + chunk_, groups_); ++g)
          quantize_tile(kernels, row_tile, g, buffers, losses_[size_t(task)]);
      });
    });
    refuse();
    QuantizeLoss total{0, 0};
    for (const QuantizeLoss& loss : losses_) {
      total.error += loss.error;
      total.norm += loss.norm;
    }
    return total;
  }

 private:
  void quantize_tile(const PackKernels& kernels, int64_t row_tile, int64_t group,
                     const Buffers& buffers, QuantizeLoss& loss) {
    const PackedMatrix& m = args_.matrix;
    const int64_t col = group * group_;
    const int valid = int(std::min<int64_t>(group_, m.cols - col));
    const int64_t size = element_nbytes(args_.type);
    const int rows = int(std::min<int64_t>(kTileChannels, m.rows - row_tile * kTileChannels));
    const void* lanes[kTileChannels];
    for (int c = 0; c < kTileChannels; ++c) {
      const int64_t row = row_tile * kTileChannels + std::min(c, rows - 1);
      lanes[c] = static_cast<const std::byte*>(args_.weight) + (row * m.cols + col) * size;
    }
    if (!kernels.gather(lanes, args_.type, valid, buffers.x)) {
      nonfinite_.fetch_add(count_nonfinite(buffers.x, valid, rows), std::memory_order_relaxed);
      return;
    }
    pad(buffers.x, valid, rows);
    QuantizeJob job{.x = buffers.x,
                    .w = args_.importance == nullptr ? nullptr : args_.importance + col,
                    .codes = buffers.codes,
                    .group = group_,
                    .valid = valid,
                    .tile = args_.out + row_tile * m.stride() + group * m.tile_bytes,
                    .error = 0,
                    .norm = 0,
                    .lost = false};
    kernels.quantize[int(m.kind)](job);
    loss.error += job.error;
    loss.norm += job.norm;
    if (job.lost) note_largest(buffers.x);
  }

  // Rows past the last are zero. Columns past the last are zero too, but repeat the last one in
  // formats with a minimum, whose range would otherwise be widened to reach a zero nobody reads.
  void pad(float* x, int valid, int rows) const {
    for (int c = rows; c < kTileChannels; ++c)
      for (int k = 0; k < valid; ++k) x[k * kTileChannels + c] = 0.0f;
    const FormatKind kind = args_.matrix.kind;
    const bool repeat = kind == FormatKind::kInt4Min || kind == FormatKind::kK4;
    const float* last = x + (valid - 1) * kTileChannels;
    for (int k = valid; k < group_; ++k)
      for (int c = 0; c < kTileChannels; ++c) x[k * kTileChannels + c] = repeat ? last[c] : 0.0f;
  }

  static int64_t count_nonfinite(const float* x, int valid, int rows) {
    int64_t bad = 0;
    for (int k = 0; k < valid; ++k)
      for (int c = 0; c < rows; ++c) bad += !std::isfinite(x[k * kTileChannels + c]);
    return bad;
  }

  void note_largest(const float* x) {
    float largest = 0;
    for (int i = 0; i < group_ * kTileChannels; ++i) largest = std::max(largest, std::fabs(x[i]));
    float seen = beyond_.load(std::memory_order_relaxed);
    while (largest > seen && !beyond_.compare_exchange_weak(seen, largest)) {
    }
  }

  void refuse() const {
    const PackedMatrix& m = args_.matrix;
    if (const int64_t bad = nonfinite_.load(); bad > 0)
      throw Error(ErrorKind::kCheckpoint, std::to_string(bad) + " of " +
                                              std::to_string(m.rows * m.cols) +
                                              " weights are not finite");
    if (const float largest = beyond_.load(); largest > 0)
      throw Error(ErrorKind::kCheckpoint, beyond(m.kind, largest));
  }

  const QuantizeArgs& args_;
  const int group_;
  const int64_t groups_, chunk_, chunks_;
  std::vector<QuantizeLoss> losses_;  // by task, so that their sum has one order
  std::atomic<int64_t> nonfinite_{0};
  std::atomic<float> beyond_{0.0f};
};

}  // namespace

bool can_quantize(const std::string& format) {
  return is_format(format) &&
         isa().pack.quantize[int(describe_matrix(format, 1, 1).kind)] != nullptr;
}

QuantizeLoss quantize(const QuantizeArgs& args) {
  if (isa().pack.quantize[int(args.matrix.kind)] == nullptr)
    throw Error(ErrorKind::kUnsupportedFormat, std::string("floats are not packed natively as ") +
                                                   layout_facts(args.matrix.kind).stem);
  return Quantizer(args).run();
}

}  // namespace moestro

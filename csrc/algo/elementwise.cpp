#include "algo/elementwise.h"

#include <algorithm>
#include <utility>

#include "isa/dispatch.h"

namespace moestro {
namespace {

// Elements per task: rows are adjacent in memory and lanes do not interact, so the live rows are
// one array, cut where a task is large against the cost of claiming it.
constexpr int64_t kChunk = 4096;

template <class Apply>
class Elementwise final : public Op {
 public:
  Elementwise(int64_t width, Rows rows, Apply apply)
      : width_(width), rows_(rows), apply_(std::move(apply)) {}

  void run(Worker& worker) override {
    const int64_t size = rows_.get() * width_;
    const FloatKernels& kernels = isa().floats;
    worker.for_tasks((size + kChunk - 1) / kChunk, [&](int64_t task) {
      const int64_t first = task * kChunk;
      apply_(kernels, first, static_cast<int>(std::min(kChunk, size - first)));
    });
  }

 private:
  int64_t width_;
  Rows rows_;
  Apply apply_;
};

template <class Apply>
std::unique_ptr<Op> make(int64_t width, Rows rows, Apply apply) {
  return std::make_unique<Elementwise<Apply>>(width, rows, std::move(apply));
}

}  // namespace

std::unique_ptr<Op> make_exp(float* x, int64_t width, Rows rows) {
  return make(width, rows,
              [x](const FloatKernels& kernels, int64_t i, int n) { kernels.exp(x + i, n); });
}

std::unique_ptr<Op> make_sigmoid(float* x, int64_t width, Rows rows) {
  return make(width, rows,
              [x](const FloatKernels& kernels, int64_t i, int n) { kernels.sigmoid(x + i, n); });
}

std::unique_ptr<Op> make_silu_mul(const float* gate, const float* up, float* out, int64_t width,
                                  Rows rows) {
  return make(width, rows, [=](const FloatKernels& kernels, int64_t i, int n) {
    kernels.silu_mul(gate + i, up + i, out + i, n);
  });
}

}  // namespace moestro

#include "algo/rope.h"

#include "algo/checks.h"
#include "isa/dispatch.h"

namespace moestro {
namespace {

class Rope final : public Op {
 public:
  Rope(const RopeArgs& args, Rows rows) : a_(args), rows_(rows) {}

  void run(Worker& worker) override {
    const FloatKernels& kernels = isa().floats;
    const int64_t rows = rows_.get();
    require_indices("rope: position", a_.positions, rows, a_.max_positions);
    worker.for_tasks(rows, [&](int64_t t) {
      const int64_t angle = a_.positions[t] * a_.half;
      float* head = a_.x + t * a_.heads * a_.head_dim + a_.offset;
      for (int64_t h = 0; h < a_.heads; ++h, head += a_.head_dim)
        kernels.rope(head, a_.cos + angle, a_.sin + angle, static_cast<int>(a_.half),
                     a_.interleaved);
    });
  }

 private:
  RopeArgs a_;
  Rows rows_;
};

}  // namespace

std::unique_ptr<Op> make_rope(const RopeArgs& args, Rows rows) {
  return std::make_unique<Rope>(args, rows);
}

}  // namespace moestro

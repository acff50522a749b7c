#include "algo/norm.h"

#include "isa/dispatch.h"

namespace moestro {
namespace {

class RmsNorm final : public Op {
 public:
  RmsNorm(const RmsNormArgs& args, Rows rows) : a_(args), rows_(rows) {}

  void run(Worker& worker) override {
    const FloatKernels& kernels = isa().floats;
    const int64_t part = a_.width / a_.groups;
    worker.for_tasks(rows_.get(), [&](int64_t t) {
      const float* x = a_.x + t * a_.width;
      if (a_.residual != nullptr) {
        kernels.add(a_.residual + t * a_.width, x, static_cast<int>(a_.width));
        x = a_.residual + t * a_.width;
      }
      for (int64_t g = 0; g < a_.groups; ++g)
        kernels.rmsnorm(x + g * part, a_.weight, a_.out + t * a_.width + g * part,
                        static_cast<int>(part), a_.eps);
    });
  }

 private:
  RmsNormArgs a_;
  Rows rows_;
};

}  // namespace

std::unique_ptr<Op> make_rmsnorm(const RmsNormArgs& args, Rows rows) {
  return std::make_unique<RmsNorm>(args, rows);
}

}  // namespace moestro

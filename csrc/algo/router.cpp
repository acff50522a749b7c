#include "algo/router.h"

#include "isa/dispatch.h"

namespace moestro {
namespace {

class Route final : public Op {
 public:
  Route(const RouteArgs& args, Rows rows) : a_(args), rows_(rows) {}

  void run(Worker& worker) override {
    const FloatKernels& kernels = isa().floats;
    const int experts = static_cast<int>(a_.experts), top_k = static_cast<int>(a_.top_k);
    worker.for_tasks(rows_.get(), [&](int64_t t) {
      if (!kernels.route(a_.logits + t * a_.experts, experts, a_.ids + t * a_.top_k,
                         a_.weights + t * a_.top_k, top_k, a_.normalize))
        throw invalid_request("route: the logits of row " + std::to_string(t) +
                              " hold NaN or have no finite maximum");
    });
  }

 private:
  RouteArgs a_;
  Rows rows_;
};

}  // namespace

std::unique_ptr<Op> make_route(const RouteArgs& args, Rows rows) {
  return std::make_unique<Route>(args, rows);
}

}  // namespace moestro

#include "algo/router.h"

#include "isa/dispatch.h"

namespace moestro {
namespace {

static_assert(3 * kMaxExperts * sizeof(float) <= Worker::kScratchBytes);

class Route final : public Op {
 public:
  Route(const RouteArgs& args, Rows rows) : a_(args), rows_(rows) {}

  void run(Worker& worker) override {
    const FloatKernels& floats = isa().floats;
    const RouteKernel route = isa().vectors->route;
    const RouteRule& rule = a_.rule;
    const bool plain = rule.is_plain_softmax();
    worker.for_tasks(rows_.get(), [&](int64_t t) {
      const float* logits = a_.logits + t * rule.experts;
      int32_t* ids = a_.ids + t * rule.top_k;
      float* weights = a_.weights + t * rule.top_k;
      auto* work = reinterpret_cast<float*>(worker.scratch());
      const bool routed =
          plain ? floats.route(logits, rule.experts, ids, weights, rule.top_k, rule.normalize)
                : route(rule, logits, ids, weights, work);
      if (!routed)
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

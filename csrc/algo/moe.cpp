// One call per layer on the resident team, three phases:
//   1. group (token, slot) pairs by expert, and quantize each token's activations once (or, after
//      that, once for each of its experts where these want the channels in orders of their own);
//   2. gate and up of 32 intermediate channels per step, activation function, re-quantization -> h;
//   3. down: a task owns output channels and walks the experts in ascending id, those that every
//      token passes last, adding weight x result into the tokens' rows. So every sum has one order,
//      with no atomics and no scratch per expert.
// Each expert's kernel is chosen by its own token count. h rows are in expert order, so phase 3
// reads them in place. In phases 2 and 3 each NUMA node has its slice of the output channels:
// weights are read only locally, the small h is exchanged through shared memory, and no sum is
// split.
#include "algo/moe.h"

#include <string>

#include "algo/moe_phases.h"

namespace moestro {
namespace {

class Moe final : public Op {
 public:
  Moe(const MoeArgs& args, Rows rows) : phases_(args, rows) {}

  void run(Worker& worker) override {
    const int64_t tokens = phases_.prepare(worker);
    MoePhases::Spans spans;
    MoePhases::Ranges ranges{};
    for (size_t g = 0; g < phases_.groups(); ++g) {
      spans[g] = phases_.group(g).all();
      ranges[g] = {0, int64_t(spans[g].size())};
    }
    phases_.gate_up(worker, spans);
    phases_.down(worker, tokens, ranges, true);
  }

 private:
  MoePhases phases_;
};

}  // namespace

Activation activation_named(const std::string& name) {
  static constexpr const char* kNames[] = {
#define MOESTRO_ACTIVATION(kind, name, gate) name,
#include "isa/activation.def"
#undef MOESTRO_ACTIVATION
  };
  std::string known;
  for (int i = 0; i < kActivationCount; ++i) {
    if (name == kNames[i]) return static_cast<Activation>(i);
    known += (i == 0 ? "" : ", ") + std::string(kNames[i]);
  }
  throw Error(ErrorKind::kUnsupportedOp,
              "moe: no kernel for activation " + name + "; known: " + known);
}

std::unique_ptr<Op> make_moe(const MoeArgs& args, Rows rows) {
  return std::make_unique<Moe>(args, rows);
}

}  // namespace moestro

#include "bind/expert_table.h"

#include "formats/format.h"

namespace moestro {
namespace {

ExpertMatrix bind_expert(const MatrixTuple& t) {
  return {describe_matrix(std::get<0>(t), std::get<1>(t), std::get<2>(t)), std::get<3>(t)};
}

const float* bind_bias(const char* name, const std::optional<Floats2>& bias, int64_t experts,
                       int64_t channels) {
  if (!bias) return nullptr;
  const std::string what = std::string("moe: ") + name;
  require_size((what + " experts").c_str(), bias->shape(0), experts);
  require_size((what + " channels").c_str(), bias->shape(1), channels);
  return bias->data();
}

}  // namespace

ExpertArgs bind_table(const ExpertTable& t, int64_t rows, int64_t hidden) {
  require_size("moe: projections", int64_t(t.projections.size()), 3);
  ExpertArgs args{.ids = t.ids.data(),
                  .weights = t.weights ? t.weights->data() : nullptr,
                  .top_k = int64_t(t.ids.shape(1)),
                  .pointers = t.pointers.data(),
                  .experts = int64_t(t.pointers.shape(0)),
                  .gate = bind_expert(t.projections[0]),
                  .up = bind_expert(t.projections[1]),
                  .down = bind_expert(t.projections[2]),
                  .input_orders = nullptr,
                  .gate_bias = nullptr,
                  .up_bias = nullptr,
                  .down_bias = nullptr,
                  .activation = activation_named(t.activation)};
  const int64_t intermediate = args.gate.matrix.rows;
  require_size("moe: gate input channels", args.gate.matrix.cols, hidden);
  require_size("moe: up input channels", args.up.matrix.cols, hidden);
  require_size("moe: up output channels", args.up.matrix.rows, intermediate);
  require_size("moe: down input channels", args.down.matrix.cols, intermediate);
  require_size("moe: down output channels", args.down.matrix.rows, hidden);
  require_size("moe: ids rows", t.ids.shape(0), rows);
  if (t.weights) {
    require_size("moe: weights rows", t.weights->shape(0), rows);
    require_size("moe: weights width", t.weights->shape(1), t.ids.shape(1));
  }
  args.gate_bias = bind_bias("gate_bias", t.gate_bias, args.experts, intermediate);
  args.up_bias = bind_bias("up_bias", t.up_bias, args.experts, intermediate);
  args.down_bias = bind_bias("down_bias", t.down_bias, args.experts, hidden);
  if (t.input_orders) {
    require_size("moe: input_orders experts", t.input_orders->shape(0), args.experts);
    require_size("moe: input_orders channels", t.input_orders->shape(1), hidden);
    args.input_orders =
        bind_order("moe: input_orders", t.input_orders->data(), args.experts * hidden, hidden);
  }
  return args;
}

}  // namespace moestro

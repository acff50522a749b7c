// Binding of the MoE operator.
#include <tuple>
#include <utility>

#include "algo/moe.h"
#include "algo/streamed_moe.h"
#include "bind/tensors.h"
#include "formats/format.h"

namespace moestro {
namespace {

using MatrixTuple = std::tuple<std::string, int64_t, int64_t, int64_t>;

// One table of experts as Python hands it over.
struct ExpertTable {
  Ints2 ids;
  Floats2 weights;
  Longs1 pointers;
  std::vector<MatrixTuple> projections;
  std::string activation;
  std::optional<Floats2> gate_bias, up_bias, down_bias;
  std::optional<Ints2> input_orders;
};

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

ExpertArgs bind_table(const ExpertTable& t, int64_t rows, int64_t hidden) {
  require_size("moe: projections", int64_t(t.projections.size()), 3);
  ExpertArgs args{.ids = t.ids.data(),
                  .weights = t.weights.data(),
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
  require_size("moe: weights rows", t.weights.shape(0), rows);
  require_size("moe: weights width", t.weights.shape(1), t.ids.shape(1));
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

std::unique_ptr<Op> make_op(MoeArgs args, Rows rows, std::shared_ptr<ExpertCache> cache) {
  if (cache == nullptr) return make_moe(args, rows);
  require_size("moe: experts of the cache", cache->experts(), args.groups[0].experts);
  args.groups[0].pointers = nullptr;
  return make_streamed_moe(args, rows, std::move(cache));
}

void moe(BoundProgram* program, Floats2 x, Ints2 ids, Floats2 weights, Longs1 pointers,
         std::vector<MatrixTuple> projections, std::string activation, Floats2 out, Ints1 rows,
         std::optional<Floats2> gate_bias, std::optional<Floats2> up_bias,
         std::optional<Floats2> down_bias, std::optional<Ints2> input_orders,
         std::optional<ExpertTable> shared, bool accumulate, std::shared_ptr<ExpertCache> cache) {
  const int64_t hidden = x.shape(1);
  require_size("moe: out width", out.shape(1), hidden);
  require_size("moe: out rows", out.shape(0), x.shape(0));
  const ExpertTable routed{
      ids,     weights,   pointers,    std::move(projections), std::move(activation), gate_bias,
      up_bias, down_bias, input_orders};
  MoeArgs args{
      .x = x.data(), .hidden = hidden, .groups = {}, .out = out.data(), .accumulate = accumulate};
  args.groups.push_back(bind_table(routed, x.shape(0), hidden));
  if (shared) args.groups.push_back(bind_table(*shared, x.shape(0), hidden));
  auto op = make_op(std::move(args), make_rows(rows, x.shape(0)), std::move(cache));
  submit(program, std::move(op), x, routed, shared, out, rows);
}

}  // namespace

void init_moe_op(nb::module_& m) {
  nb::class_<ExpertTable>(m, "ExpertTable",
                          "Experts as blobs, and which of them each token passes.")
      .def(
          "__init__",
          [](ExpertTable* t, Ints2 ids, Floats2 weights, Longs1 pointers,
             std::vector<MatrixTuple> projections, std::string activation,
             std::optional<Floats2> gate_bias, std::optional<Floats2> up_bias,
             std::optional<Floats2> down_bias, std::optional<Ints2> input_orders) {
            new (t) ExpertTable{ids,
                                weights,
                                pointers,
                                std::move(projections),
                                std::move(activation),
                                gate_bias,
                                up_bias,
                                down_bias,
                                input_orders};
          },
          nb::arg("ids").noconvert(), nb::arg("weights").noconvert(),
          nb::arg("pointers").noconvert(), nb::arg("projections"), nb::arg("activation"),
          nb::kw_only(), nb::arg("gate_bias").noconvert().none() = nb::none(),
          nb::arg("up_bias").noconvert().none() = nb::none(),
          nb::arg("down_bias").noconvert().none() = nb::none(),
          nb::arg("input_orders").noconvert().none() = nb::none());
  m.def("moe", &moe, nb::arg("program").none(), nb::arg("x").noconvert(),
        nb::arg("ids").noconvert(), nb::arg("weights").noconvert(), nb::arg("pointers").noconvert(),
        nb::arg("projections"), nb::arg("activation"), nb::arg("out").noconvert(),
        nb::arg("rows").noconvert(), nb::kw_only(),
        nb::arg("gate_bias").noconvert().none() = nb::none(),
        nb::arg("up_bias").noconvert().none() = nb::none(),
        nb::arg("down_bias").noconvert().none() = nb::none(),
        nb::arg("input_orders").noconvert().none() = nb::none(),
        nb::arg("shared").none() = nb::none(), nb::arg("accumulate") = false,
        nb::arg("cache").none() = nb::none());
}

}  // namespace moestro

// Binding of the MoE operator.
#include <tuple>
#include <utility>

#include "algo/moe.h"
#include "algo/streamed_moe.h"
#include "bind/expert_table.h"

namespace moestro {
namespace {

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
  require(!shared || shared->weights, "moe: shared experts need weights");
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
          [](ExpertTable* t, Ints2 ids, std::optional<Floats2> weights, Longs1 pointers,
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
          nb::arg("ids").noconvert(), nb::arg("weights").noconvert().none(),
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

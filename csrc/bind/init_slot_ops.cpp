// Bindings of the MoE operator's halves, and of copies.
#include "algo/expert_slots.h"
#include "bind/expert_table.h"

namespace moestro {
namespace {

using AnyRows = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// y [T, top_k, hidden] for ids [T, top_k].
void require_slots(const char* op, const Floats3& y, const Ints2& ids) {
  require_size((std::string(op) + ": slots of rows").c_str(), y.shape(0), ids.shape(0));
  require_size((std::string(op) + ": slots of a row").c_str(), y.shape(1), ids.shape(1));
}

void moe_slots(BoundProgram* program, Floats2 x, const ExpertTable& experts, Floats3 y,
               Ints1 rows) {
  require_slots("moe_slots", y, experts.ids);
  require_size("moe_slots: width of slots", y.shape(2), x.shape(1));
  MoeArgs args{.x = x.data(),
               .hidden = int64_t(x.shape(1)),
               .groups = {},
               .out = y.data(),
               .accumulate = false};
  args.groups.push_back(bind_table(experts, x.shape(0), x.shape(1)));
  submit(program, make_moe_slots(args, make_rows(rows, x.shape(0))), x, experts, y, rows);
}

void combine_experts(BoundProgram* program, Floats3 y, Ints2 ids, Floats2 weights, Floats2 out,
                     Ints1 rows, bool accumulate) {
  require_slots("combine_experts", y, ids);
  require_size("combine_experts: weights rows", weights.shape(0), ids.shape(0));
  require_size("combine_experts: weights width", weights.shape(1), ids.shape(1));
  require_size("combine_experts: out rows", out.shape(0), y.shape(0));
  require_size("combine_experts: out width", out.shape(1), y.shape(2));
  const CombineArgs args{.y = y.data(),
                         .ids = ids.data(),
                         .weights = weights.data(),
                         .top_k = int64_t(y.shape(1)),
                         .hidden = int64_t(y.shape(2)),
                         .out = out.data(),
                         .accumulate = accumulate};
  submit(program, make_combine_experts(args, make_rows(rows, y.shape(0))), y, ids, weights, out,
         rows);
}

void copy_slots(BoundProgram* program, Floats3 from, Ints2 ids, Longs1 pointers, Floats3 to,
                Ints1 rows) {
  require_slots("copy_slots", from, ids);
  require_slots("copy_slots", to, ids);
  require_size("copy_slots: width", to.shape(2), from.shape(2));
  const CopySlotsArgs args{.from = from.data(),
                           .ids = ids.data(),
                           .pointers = pointers.data(),
                           .experts = int64_t(pointers.shape(0)),
                           .top_k = int64_t(from.shape(1)),
                           .hidden = int64_t(from.shape(2)),
                           .to = to.data()};
  submit(program, make_copy_slots(args, make_rows(rows, from.shape(0))), from, ids, pointers, to,
         rows);
}

void copy_rows(BoundProgram* program, AnyRows x, AnyRows out, Ints1 rows) {
  require(x.dtype() == out.dtype(), "copy_rows: x and out are of different types");
  require_size("copy_rows: rows", out.shape(0), x.shape(0));
  require_size("copy_rows: width", out.shape(1), x.shape(1));
  const CopyRowsArgs args{.x = static_cast<const std::byte*>(x.data()),
                          .out = static_cast<std::byte*>(out.data()),
                          .width = int64_t(x.shape(1) * x.itemsize())};
  submit(program, make_copy_rows(args, make_rows(rows, x.shape(0))), x, out, rows);
}

auto exact(const char* name) { return nb::arg(name).noconvert(); }

}  // namespace

void init_slot_ops(nb::module_& m) {
  m.def("moe_slots", &moe_slots, nb::arg("program").none(), exact("x"), nb::arg("experts"),
        exact("y"), exact("rows"));
  m.def("combine_experts", &combine_experts, nb::arg("program").none(), exact("y"), exact("ids"),
        exact("weights"), exact("out"), exact("rows"), nb::kw_only(),
        nb::arg("accumulate") = false);
  m.def("copy_slots", &copy_slots, nb::arg("program").none(), exact("source"), exact("ids"),
        exact("pointers"), exact("out"), exact("rows"));
  m.def("copy_rows", &copy_rows, nb::arg("program").none(), exact("x"), exact("out"),
        exact("rows"));
}

}  // namespace moestro

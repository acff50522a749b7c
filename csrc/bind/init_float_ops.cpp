// Bindings of the float row ops.
#include "algo/norm.h"
#include "bind/tensors.h"

namespace moestro {
namespace {

void rmsnorm(BoundProgram* program, Floats2 x, Floats1 weight, Floats2 out, Ints1 rows, float eps,
             int64_t groups, std::optional<Floats2> residual) {
  const int64_t width = x.shape(1);
  require(groups >= 1 && width % groups == 0,
          "rmsnorm: groups " + std::to_string(groups) + " does not divide " + std::to_string(width));
  require_size("rmsnorm: weight size", weight.shape(0), width / groups);
  require_size("rmsnorm: out width", out.shape(1), width);
  require_size("rmsnorm: out rows", out.shape(0), x.shape(0));
  if (residual) {
    require_size("rmsnorm: residual width", residual->shape(1), width);
    require_size("rmsnorm: residual rows", residual->shape(0), x.shape(0));
  }
  const RmsNormArgs args{.x = x.data(),
                         .weight = weight.data(),
                         .out = out.data(),
                         .residual = residual ? residual->data() : nullptr,
                         .width = width,
                         .groups = groups,
                         .eps = eps};
  submit(program, make_rmsnorm(args, make_rows(rows, x.shape(0))), x, weight, out, rows, residual);
}

}  // namespace

void init_float_ops(nb::module_& m) {
  m.def("rmsnorm", &rmsnorm, nb::arg("program").none(), nb::arg("x"), nb::arg("weight"),
        nb::arg("out"), nb::arg("rows"), nb::kw_only(), nb::arg("eps"), nb::arg("groups") = 1,
        nb::arg("residual").none() = nb::none());
}

}  // namespace moestro

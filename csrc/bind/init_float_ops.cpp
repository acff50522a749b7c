// Bindings of the float row ops. No argument is converted: an op must write into the caller's own
// memory, never into a copy made to fit.
#include "algo/elementwise.h"
#include "algo/gather.h"
#include "algo/norm.h"
#include "algo/rope.h"
#include "algo/router.h"
#include "bind/tensors.h"

namespace moestro {
namespace {

void rmsnorm(BoundProgram* program, Floats2 x, Floats1 weight, Floats2 out, Ints1 rows, float eps,
             int64_t groups, std::optional<Floats2> residual) {
  const int64_t width = x.shape(1);
  require(groups >= 1 && width % groups == 0, "rmsnorm: groups " + std::to_string(groups) +
                                                  " does not divide " + std::to_string(width));
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

void rope(BoundProgram* program, Floats2 x, Ints1 positions, Floats2 cos, Floats2 sin, Ints1 rows,
          int64_t heads, bool interleaved, int64_t offset) {
  const int64_t width = x.shape(1);
  require(heads >= 1 && width % heads == 0,
          "rope: " + std::to_string(heads) + " heads do not divide width " + std::to_string(width));
  const int64_t head_dim = width / heads, half = cos.shape(1);
  require(offset >= 0, "rope: offset " + std::to_string(offset) + " is negative");
  require(offset + 2 * half <= head_dim, "rope: " + std::to_string(offset + 2 * half) +
                                             " rotary channels exceed head_dim " +
                                             std::to_string(head_dim));
  require_size("rope: sin positions", sin.shape(0), cos.shape(0));
  require_size("rope: sin width", sin.shape(1), half);
  require_size("rope: positions", positions.shape(0), x.shape(0));
  const RopeArgs args{.x = x.data(),
                      .positions = positions.data(),
                      .cos = cos.data(),
                      .sin = sin.data(),
                      .heads = heads,
                      .head_dim = head_dim,
                      .offset = offset,
                      .half = half,
                      .max_positions = static_cast<int64_t>(cos.shape(0)),
                      .interleaved = interleaved};
  submit(program, make_rope(args, make_rows(rows, x.shape(0))), x, positions, cos, sin, rows);
}

void gather_rows(BoundProgram* program, Floats2 x, Ints1 indices, Floats2 out, Ints1 rows) {
  require_size("gather_rows: out width", out.shape(1), x.shape(1));
  require_size("gather_rows: out rows", out.shape(0), indices.shape(0));
  const GatherArgs args{.x = x.data(),
                        .indices = indices.data(),
                        .out = out.data(),
                        .source_rows = static_cast<int64_t>(x.shape(0)),
                        .width = static_cast<int64_t>(x.shape(1))};
  submit(program, make_gather(args, make_rows(rows, out.shape(0))), x, indices, out, rows);
}

Scoring scoring_named(const std::string& name) {
  if (name == "softmax") return Scoring::kSoftmax;
  if (name == "sigmoid") return Scoring::kSigmoid;
  throw Error(ErrorKind::kUnsupportedOp,
              "route: scoring " + name + "; this build has: softmax, sigmoid");
}

void require_choice(int64_t top_k, int64_t experts, int64_t groups, int64_t top_groups) {
  const auto refuse = [](const std::string& what) {
    throw Error(ErrorKind::kUnsupportedOp, "route: " + what);
  };
  const std::string all = std::to_string(experts) + " experts";
  if (experts > kMaxExperts) refuse(all + " are more than " + std::to_string(kMaxExperts));
  if (groups < 1 || experts % groups != 0)
    refuse(all + " do not divide into " + std::to_string(groups) + " groups");
  if (top_groups < 1 || top_groups > groups)
    refuse("top " + std::to_string(top_groups) + " of " + std::to_string(groups) + " groups");
  const int64_t eligible = experts / groups * top_groups;
  if (top_k < 1 || top_k > eligible)
    refuse("top " + std::to_string(top_k) + " of " + std::to_string(eligible) + " experts");
}

void route(BoundProgram* program, Floats2 logits, Ints2 ids, Floats2 weights, Ints1 rows,
           bool normalize, const std::string& scoring, std::optional<Floats1> bias, int64_t groups,
           int64_t top_groups, float scale) {
  const int64_t tokens = logits.shape(0), experts = logits.shape(1), top_k = ids.shape(1);
  require_size("route: ids rows", ids.shape(0), tokens);
  require_size("route: weights rows", weights.shape(0), tokens);
  require_size("route: weights width", weights.shape(1), top_k);
  if (bias) require_size("route: bias", bias->shape(0), experts);
  require_choice(top_k, experts, groups, top_groups);
  const RouteArgs args{.logits = logits.data(),
                       .ids = ids.data(),
                       .weights = weights.data(),
                       .rule = {.scoring = scoring_named(scoring),
                                .bias = bias ? bias->data() : nullptr,
                                .experts = static_cast<int>(experts),
                                .top_k = static_cast<int>(top_k),
                                .groups = static_cast<int>(groups),
                                .top_groups = static_cast<int>(top_groups),
                                .normalize = normalize,
                                .scale = scale}};
  submit(program, make_route(args, make_rows(rows, tokens)), logits, ids, weights, rows, bias);
}

void silu_mul(BoundProgram* program, Floats2 gate, Floats2 up, Floats2 out, Ints1 rows) {
  for (const Floats2* other : {&up, &out}) {
    require_size("silu_mul: rows", other->shape(0), gate.shape(0));
    require_size("silu_mul: width", other->shape(1), gate.shape(1));
  }
  submit(program,
         make_silu_mul(gate.data(), up.data(), out.data(), gate.shape(1),
                       make_rows(rows, gate.shape(0))),
         gate, up, out, rows);
}

void exp(BoundProgram* program, Floats2 x, Ints1 rows) {
  submit(program, make_exp(x.data(), x.shape(1), make_rows(rows, x.shape(0))), x, rows);
}

void sigmoid(BoundProgram* program, Floats2 x, Ints1 rows) {
  submit(program, make_sigmoid(x.data(), x.shape(1), make_rows(rows, x.shape(0))), x, rows);
}

auto exact(const char* name) { return nb::arg(name).noconvert(); }

}  // namespace

void init_float_ops(nb::module_& m) {
  m.def("rmsnorm", &rmsnorm, nb::arg("program").none(), exact("x"), exact("weight"), exact("out"),
        exact("rows"), nb::kw_only(), nb::arg("eps"), nb::arg("groups") = 1,
        exact("residual").none() = nb::none());
  m.def("rope", &rope, nb::arg("program").none(), exact("x"), exact("positions"), exact("cos"),
        exact("sin"), exact("rows"), nb::kw_only(), nb::arg("heads"),
        nb::arg("interleaved") = false, nb::arg("offset") = 0);
  m.def("gather_rows", &gather_rows, nb::arg("program").none(), exact("x"), exact("indices"),
        exact("out"), exact("rows"));
  m.def("route", &route, nb::arg("program").none(), exact("logits"), exact("ids"), exact("weights"),
        exact("rows"), nb::kw_only(), nb::arg("normalize"), nb::arg("scoring") = "softmax",
        exact("bias").none() = nb::none(), nb::arg("groups") = 1, nb::arg("top_groups") = 1,
        nb::arg("scale") = 1.0f);
  m.def("silu_mul", &silu_mul, nb::arg("program").none(), exact("gate"), exact("up"), exact("out"),
        exact("rows"));
  m.def("exp", &exp, nb::arg("program").none(), exact("x"), exact("rows"));
  m.def("sigmoid", &sigmoid, nb::arg("program").none(), exact("x"), exact("rows"));
}

}  // namespace moestro

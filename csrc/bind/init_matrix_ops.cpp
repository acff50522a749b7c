// Bindings of the packed matrix ops.
#include <tuple>

#include "algo/linear.h"
#include "algo/moe.h"
#include "algo/multiply.h"
#include "algo/probe.h"
#include "bind/tensors.h"
#include "formats/format.h"
#include "isa/dispatch.h"

namespace moestro {
namespace {

PackedMatrix bind_matrix(const char* what, const std::string& format, const Bytes1& data,
                         int64_t rows, int64_t cols) {
  PackedMatrix matrix = describe_matrix(format, rows, cols);
  require_size(what, data.shape(0), matrix.nbytes());
  matrix.data = data.data();
  return matrix;
}

void linear(BoundProgram* program, Floats2 x, const std::string& format, Bytes1 data, int64_t n,
            int64_t k, Floats2 out, Ints1 rows, std::optional<Floats1> bias, bool accumulate) {
  const PackedMatrix weight = bind_matrix("linear: weight bytes", format, data, n, k);
  require_size("linear: x width", x.shape(1), k);
  require_size("linear: out width", out.shape(1), n);
  require_size("linear: out rows", out.shape(0), x.shape(0));
  if (bias) require_size("linear: bias size", bias->shape(0), n);
  const LinearArgs args{.x = x.data(),
                        .weight = weight,
                        .out = out.data(),
                        .bias = bias ? bias->data() : nullptr,
                        .accumulate = accumulate};
  submit(program, make_linear(args, make_rows(rows, x.shape(0))), x, data, out, rows, bias);
}

void embed_tokens(BoundProgram* program, Ints1 ids, const std::string& format, Bytes1 data,
                  int64_t vocab, int64_t hidden, Floats2 out, Ints1 rows) {
  const PackedMatrix weight =
      bind_matrix("embed_tokens: weight bytes", format, data, vocab, hidden);
  require_size("embed_tokens: out width", out.shape(1), hidden);
  require(ids.shape(0) >= out.shape(0), "embed_tokens: fewer ids than output rows");
  const EmbedArgs args{.ids = ids.data(), .weight = weight, .out = out.data()};
  submit(program, make_embed(args, make_rows(rows, out.shape(0))), ids, data, out, rows);
}

using MatrixTuple = std::tuple<std::string, int64_t, int64_t, int64_t>;

ExpertMatrix bind_expert(const MatrixTuple& t) {
  return {describe_matrix(std::get<0>(t), std::get<1>(t), std::get<2>(t)), std::get<3>(t)};
}

void require_bias(const std::string& what, const std::optional<Floats2>& bias, int64_t experts,
                  int64_t channels) {
  if (!bias) return;
  require_size((what + " experts").c_str(), bias->shape(0), experts);
  require_size((what + " channels").c_str(), bias->shape(1), channels);
}

void moe(BoundProgram* program, Floats2 x, Ints2 ids, Floats2 weights, Longs1 pointers,
         const std::vector<MatrixTuple>& projections, const std::string& activation, Floats2 out,
         Ints1 rows, std::optional<Floats2> gate_bias, std::optional<Floats2> up_bias,
         std::optional<Floats2> down_bias, bool accumulate) {
  require_size("moe: projections", int64_t(projections.size()), 3);
  const MoeArgs args{.x = x.data(),
                     .ids = ids.data(),
                     .weights = weights.data(),
                     .top_k = int64_t(ids.shape(1)),
                     .pointers = pointers.data(),
                     .experts = int64_t(pointers.shape(0)),
                     .gate = bind_expert(projections[0]),
                     .up = bind_expert(projections[1]),
                     .down = bind_expert(projections[2]),
                     .gate_bias = gate_bias ? gate_bias->data() : nullptr,
                     .up_bias = up_bias ? up_bias->data() : nullptr,
                     .down_bias = down_bias ? down_bias->data() : nullptr,
                     .activation = activation_named(activation),
                     .out = out.data(),
                     .accumulate = accumulate};
  const int64_t hidden = x.shape(1), intermediate = args.gate.matrix.rows;
  require_size("moe: gate input channels", args.gate.matrix.cols, hidden);
  require_size("moe: up input channels", args.up.matrix.cols, hidden);
  require_size("moe: up output channels", args.up.matrix.rows, intermediate);
  require_size("moe: down input channels", args.down.matrix.cols, intermediate);
  require_size("moe: down output channels", args.down.matrix.rows, hidden);
  require_size("moe: out width", out.shape(1), hidden);
  require_size("moe: out rows", out.shape(0), x.shape(0));
  require_size("moe: ids rows", ids.shape(0), x.shape(0));
  require_size("moe: weights rows", weights.shape(0), x.shape(0));
  require_size("moe: weights width", weights.shape(1), ids.shape(1));
  require_bias("moe: gate_bias", gate_bias, args.experts, intermediate);
  require_bias("moe: up_bias", up_bias, args.experts, intermediate);
  require_bias("moe: down_bias", down_bias, args.experts, hidden);
  submit(program, make_moe(args, make_rows(rows, x.shape(0))), x, ids, weights, pointers, out, rows,
         gate_bias, up_bias, down_bias);
}

nb::ndarray<nb::numpy, float> decode(const std::string& format, Bytes1 data, int64_t rows,
                                     int64_t cols) {
  const PackedMatrix matrix = bind_matrix("decode: weight bytes", format, data, rows, cols);
  auto* values = new float[size_t(rows * cols)];
  nb::capsule owner(values, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  for (int64_t r = 0; r < rows; ++r) decode_row(matrix, r, values + r * cols);
  return nb::ndarray<nb::numpy, float>(values, {size_t(rows), size_t(cols)}, owner);
}

void multiply(const std::string& isa, Floats2 x, const std::string& format, Bytes1 data, int64_t n,
              int64_t k, Floats2 out) {
  const IsaTable& table = isa_named(isa);
  const PackedMatrix weight = bind_matrix("multiply: weight bytes", format, data, n, k);
  require_size("multiply: x width", int64_t(x.shape(1)), k);
  require_size("multiply: out width", int64_t(out.shape(1)), n);
  require_size("multiply: out rows", int64_t(out.shape(0)), int64_t(x.shape(0)));
  nb::gil_scoped_release release;
  multiply_by(table, weight, x.data(), int64_t(x.shape(0)), out.data());
}

}  // namespace

void init_matrix_ops(nb::module_& m) {
  m.def("linear", &linear, nb::arg("program").none(), nb::arg("x").noconvert(), nb::arg("format"),
        nb::arg("data").noconvert(), nb::arg("n"), nb::arg("k"), nb::arg("out").noconvert(),
        nb::arg("rows").noconvert(), nb::kw_only(), nb::arg("bias").noconvert().none() = nb::none(),
        nb::arg("accumulate") = false);
  m.def("multiply", &multiply, nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("format"),
        nb::arg("data").noconvert(), nb::arg("n"), nb::arg("k"), nb::arg("out").noconvert(),
        "linear by the kernels of a named instruction set, in the calling thread.");
  m.def("embed_tokens", &embed_tokens, nb::arg("program").none(), nb::arg("ids").noconvert(),
        nb::arg("format"), nb::arg("data").noconvert(), nb::arg("vocab"), nb::arg("hidden"),
        nb::arg("out").noconvert(), nb::arg("rows").noconvert());
  m.def("moe", &moe, nb::arg("program").none(), nb::arg("x").noconvert(),
        nb::arg("ids").noconvert(), nb::arg("weights").noconvert(), nb::arg("pointers").noconvert(),
        nb::arg("projections"), nb::arg("activation"), nb::arg("out").noconvert(),
        nb::arg("rows").noconvert(), nb::kw_only(),
        nb::arg("gate_bias").noconvert().none() = nb::none(),
        nb::arg("up_bias").noconvert().none() = nb::none(),
        nb::arg("down_bias").noconvert().none() = nb::none(), nb::arg("accumulate") = false);
  m.def("decode", &decode, nb::arg("format"), nb::arg("data").noconvert(), nb::arg("rows"),
        nb::arg("cols"), "Decoded float32 [rows, cols], element by element.");
  m.def("format_names", &format_names);
  m.def(
      "format_nbytes",
      [](const std::string& format, int64_t rows, int64_t cols) {
        return describe_matrix(format, rows, cols).nbytes();
      },
      nb::arg("format"), nb::arg("rows"), nb::arg("cols"));
  m.def("probe_read", &probe_read, nb::arg("nbytes"), nb::call_guard<nb::gil_scoped_release>(),
        "Best of a few passes over fresh memory: bytes read per second by the whole team.");
  m.def("probe_dot", &probe_dot, nb::call_guard<nb::gil_scoped_release>(),
        "Integer operations per second of the whole team (a multiply-add counts two).");
  m.def("probe_fma", &probe_fma, nb::call_guard<nb::gil_scoped_release>(),
        "Float32 operations per second of the whole team (a multiply-add counts two).");
  m.def("probe_bf16", &probe_bf16, nb::call_guard<nb::gil_scoped_release>(),
        "Bfloat16 operations per second of the whole team (a multiply-add counts two): the dot of "
        "pairs where the instruction set has one, else the float32 multiply-add.");
}

}  // namespace moestro

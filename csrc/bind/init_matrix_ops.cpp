// Bindings of the packed matrix ops.
#include "algo/linear.h"
#include "algo/linear_heads.h"
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
            int64_t k, Floats2 out, Ints1 rows, std::optional<Floats1> bias,
            std::optional<Ints1> input_order, bool accumulate) {
  const PackedMatrix weight = bind_matrix("linear: weight bytes", format, data, n, k);
  require_size("linear: x width", x.shape(1), k);
  require_size("linear: out width", out.shape(1), n);
  require_size("linear: out rows", out.shape(0), x.shape(0));
  if (bias) require_size("linear: bias size", bias->shape(0), n);
  const char* order_name = "linear: input_order";
  if (input_order) require_size(order_name, input_order->shape(0), k);
  const LinearArgs args{
      .x = x.data(),
      .weight = weight,
      .input_order = input_order ? bind_order(order_name, input_order->data(), k, k) : nullptr,
      .out = out.data(),
      .bias = bias ? bias->data() : nullptr,
      .accumulate = accumulate};
  submit(program, make_linear(args, make_rows(rows, x.shape(0))), x, data, out, rows, bias,
         input_order);
}

void linear_heads(BoundProgram* program, Floats2 x, const std::string& format, Bytes1 data,
                  int64_t n, int64_t k, Floats2 out, Ints1 rows, int64_t heads) {
  const PackedMatrix weight = bind_matrix("linear_heads: weight bytes", format, data, n, k);
  require(heads >= 1 && n % heads == 0 && x.shape(1) % heads == 0,
          "linear_heads: " + std::to_string(heads) + " heads do not divide " + std::to_string(n) +
              " rows and x width " + std::to_string(x.shape(1)));
  const int64_t x_width = static_cast<int64_t>(x.shape(1)) / heads;
  require(x_width >= k, "linear_heads: x has " + std::to_string(x_width) +
                            " channels per head, expected at least " + std::to_string(k));
  require_size("linear_heads: out width", out.shape(1), n);
  require_size("linear_heads: out rows", out.shape(0), x.shape(0));
  if (n / heads % kTileChannels != 0)
    throw Error(ErrorKind::kUnsupportedOp, "linear_heads: " + std::to_string(n / heads) +
                                               " channels of a head are not a multiple of 16");
  if (weight.padded_cols > kMaxHeadInputs)
    throw Error(ErrorKind::kUnsupportedOp, "linear_heads: " + std::to_string(k) +
                                               " input channels are more than " +
                                               std::to_string(kMaxHeadInputs));
  const LinearHeadsArgs args{
      .x = x.data(), .weight = weight, .out = out.data(), .heads = heads, .x_width = x_width};
  submit(program, make_linear_heads(args, make_rows(rows, x.shape(0))), x, data, out, rows);
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
        nb::arg("input_order").noconvert().none() = nb::none(), nb::arg("accumulate") = false);
  m.def("multiply", &multiply, nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("format"),
        nb::arg("data").noconvert(), nb::arg("n"), nb::arg("k"), nb::arg("out").noconvert(),
        "linear by the kernels of a named instruction set, in the calling thread.");
  m.def("linear_heads", &linear_heads, nb::arg("program").none(), nb::arg("x").noconvert(),
        nb::arg("format"), nb::arg("data").noconvert(), nb::arg("n"), nb::arg("k"),
        nb::arg("out").noconvert(), nb::arg("rows").noconvert(), nb::kw_only(), nb::arg("heads"));
  m.def("embed_tokens", &embed_tokens, nb::arg("program").none(), nb::arg("ids").noconvert(),
        nb::arg("format"), nb::arg("data").noconvert(), nb::arg("vocab"), nb::arg("hidden"),
        nb::arg("out").noconvert(), nb::arg("rows").noconvert());
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

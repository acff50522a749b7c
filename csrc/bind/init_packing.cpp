// Bindings of the packers. Outputs are written in place; nothing is converted on the way in.
#include "algo/quantize.h"
#include "bind/tensors.h"
#include "formats/format.h"
#include "formats/pack_exact.h"

namespace moestro {
namespace {

using Matrix = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;

FloatType float_type(const Matrix& weight) {
  const nb::dlpack::dtype type = weight.dtype();
  if (type == nb::dtype<float>()) return FloatType::kF32;
  const auto code = static_cast<nb::dlpack::dtype_code>(type.code);
  if (type.lanes == 1 && type.bits == 16 && code == nb::dlpack::dtype_code::Float)
    return FloatType::kF16;
  if (type.lanes == 1 && type.bits == 16 && code == nb::dlpack::dtype_code::Bfloat)
    return FloatType::kBf16;
  throw Error(ErrorKind::kUnsupportedFormat,
              "weights to quantize are float32, float16 or bfloat16 numbers");
}

void bind_repack(const std::string& format, const std::string& source_type, Bytes1 raw,
                 int64_t rows, int64_t cols, Bytes1 out, bool alone) {
  const PackedMatrix matrix = describe_matrix(format, rows, cols);
  require_size("repack: source bytes", raw.shape(0), rows * source_row_nbytes(matrix, source_type));
  require_size("repack: packed bytes", out.shape(0), matrix.nbytes());
  nb::gil_scoped_release release;
  repack(matrix, source_type, raw.data(), out.data(), alone);
}

std::tuple<double, double> bind_quantize(const std::string& format, Matrix weight,
                                         std::optional<Floats1> importance, Bytes1 out) {
  const PackedMatrix matrix =
      describe_matrix(format, int64_t(weight.shape(0)), int64_t(weight.shape(1)));
  require_size("quantize: packed bytes", out.shape(0), matrix.nbytes());
  if (importance) require_size("quantize: importance", importance->shape(0), matrix.padded_cols);
  const QuantizeArgs args{.weight = weight.data(),
                          .type = float_type(weight),
                          .matrix = matrix,
                          .importance = importance ? importance->data() : nullptr,
                          .out = out.data()};
  nb::gil_scoped_release release;
  const QuantizeLoss loss = quantize(args);
  return {loss.error, loss.norm};
}

template <size_t kPoints>
std::vector<int> words(const uint16_t (&grid)[kPoints]) {
  return {grid, grid + kPoints};
}

std::vector<int> bind_grid(const std::string& format) {
  switch (describe_matrix(format, 1, 1).kind) {
    case FormatKind::kIq2xxs:
      return words(kGridIq2xxs);
    case FormatKind::kIq2xs:
      return words(kGridIq2xs);
    case FormatKind::kIq2s:
      return words(kGridIq2s);
    case FormatKind::kIq3xxs:
      return words(kGridIq3xxs);
    case FormatKind::kIq3s:
      return words(kGridIq3s);
    case FormatKind::kIq1s:
    case FormatKind::kIq1m:
      return words(kGridIq1);
    default:
      throw Error(ErrorKind::kUnsupportedFormat, "weight format " + format + " has no grid");
  }
}

}  // namespace

void init_packing(nb::module_& m) {
  m.def("can_repack", &can_repack, nb::arg("format"), nb::arg("source_type"),
        "Whether checkpoint bytes of that type are repacked into the format natively.");
  m.def("can_quantize", &can_quantize, nb::arg("format"),
        "Whether floats are packed into the format natively.");
  m.def("repack", &bind_repack, nb::arg("format"), nb::arg("source_type"),
        nb::arg("raw").noconvert(), nb::arg("rows"), nb::arg("cols"), nb::arg("out").noconvert(),
        nb::arg("alone") = false);
  m.def("quantize", &bind_quantize, nb::arg("format"), nb::arg("weight").noconvert(),
        nb::arg("importance").noconvert().none(), nb::arg("out").noconvert(),
        "Squared error and squared norm of the packed weights.");
  m.def("grid", &bind_grid, nb::arg("format"),
        "The points of a lattice format's grid, as words (formats/lattice_grids.def).");
}

}  // namespace moestro

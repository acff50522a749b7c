// Tensor argument types and the checks every binding makes before it builds an op.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "algo/rows.h"
#include "core/error.h"
#include "core/program.h"

namespace nb = nanobind;

namespace moestro {

using Floats1 = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats2 = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats3 = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Ints1 = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints2 = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Longs1 = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes1 = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A Program and the Python buffers its ops point into.
struct BoundProgram {
  BoundProgram() = default;
  BoundProgram(const BoundProgram&) = delete;
  BoundProgram& operator=(const BoundProgram&) = delete;

  Program program;
  std::vector<std::shared_ptr<void>> buffers;
};

inline void require(bool condition, const std::string& message) {
  if (!condition) throw invalid_request(message);
}

inline void require_size(const char* what, int64_t found, int64_t wanted) {
  require(found == wanted, std::string(what) + " is " + std::to_string(found) + ", expected " +
                               std::to_string(wanted));
}

// An order of `cols` input channels as kernels follow it: `count` indices, every one in range.
inline const int32_t* bind_order(const char* what, const int32_t* order, int64_t count,
                                 int64_t cols) {
  for (int64_t i = 0; i < count; ++i)
    require(order[i] >= 0 && order[i] < cols, std::string(what) + " names channel " +
                                                  std::to_string(order[i]) + " of " +
                                                  std::to_string(cols));
  return order;
}

inline Rows make_rows(const Ints1& rows, int64_t capacity) {
  require(rows.shape(0) >= 1, "rows must hold one int32");
  return Rows(rows.data(), capacity);
}

// Records the op into the program, keeping its buffers alive, or runs it now without the GIL.
template <class... Buffers>
void submit(BoundProgram* program, std::unique_ptr<Op> op, Buffers... buffers) {
  if (program != nullptr) {
    program->program.add(std::move(op));
    program->buffers.push_back(std::make_shared<std::tuple<Buffers...>>(std::move(buffers)...));
    return;
  }
  nb::gil_scoped_release release;
  run_op(*op);
}

void init_runtime(nb::module_& m);
void init_float_ops(nb::module_& m);
void init_attention_ops(nb::module_& m);
void init_latent_ops(nb::module_& m);
void init_matrix_ops(nb::module_& m);
void init_moe_op(nb::module_& m);
void init_slot_ops(nb::module_& m);
void init_streams(nb::module_& m);
void init_packing(nb::module_& m);
void init_tiers(nb::module_& m);
void init_stream(nb::module_& m);

}  // namespace moestro

// A table of experts as Python hands it over, and its checks.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "algo/moe.h"
#include "bind/tensors.h"

namespace moestro {

// Format, rows, columns, offset in the blob.
using MatrixTuple = std::tuple<std::string, int64_t, int64_t, int64_t>;

// Which experts there are, and which of them each token passes.
struct ExpertTable {
  Ints2 ids;
  std::optional<Floats2> weights;  // without: all one
  Longs1 pointers;
  std::vector<MatrixTuple> projections;
  std::string activation;
  std::optional<Floats2> gate_bias, up_bias, down_bias;
  std::optional<Ints2> input_orders;
};

// What ops take, for activations [rows, hidden]. Its buffers are those of the table.
ExpertArgs bind_table(const ExpertTable& t, int64_t rows, int64_t hidden);

}  // namespace moestro

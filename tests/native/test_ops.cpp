// Every op on every instruction set of the machine and on the models, with small odd shapes, from
// several threads at once. A sanitizer watches; beyond that results must be those of the plainest
// table, which the tests of tests/kernels compare with float64.
#include <atomic>
#include <bit>
#include <cmath>
#include <iterator>
#include <thread>

#include "algo/attention.h"
#include "algo/elementwise.h"
#include "algo/gather.h"
#include "algo/linear.h"
#include "algo/moe.h"
#include "algo/norm.h"
#include "algo/quantize.h"
#include "algo/rope.h"
#include "algo/router.h"
#include "check.h"
#include "formats/pack_exact.h"
#include "isa/dispatch.h"

namespace moestro_test {
namespace {

using namespace moestro;

constexpr int64_t kRows = 37, kCols = 300;

// Equal bits, any NaN for any other: random bytes hold scales that are none.
bool same(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i]) &&
        !(std::isnan(a[i]) && std::isnan(b[i])))
      return false;
  return true;
}

PackedMatrix matrix(const std::string& format, int64_t rows, int64_t cols,
                    std::vector<uint8_t>& data, uint32_t seed) {
  PackedMatrix m = describe_matrix(format, rows, cols);
  data = bytes(m.nbytes(), seed);
  m.data = data.data();
  return m;
}

// An order of `cols` channels for each of `count` inputs: descending, each from another one on.
std::vector<int32_t> orders(int64_t count, int64_t cols) {
  std::vector<int32_t> found;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t k = cols; k > 0; --k) found.push_back(static_cast<int32_t>((k + i) % cols));
  return found;
}

std::vector<float> linear(const std::string& format, int32_t tokens) {
  std::vector<uint8_t> data;
  const PackedMatrix weight = matrix(format, kRows, kCols, data, 7);
  const auto x = floats(tokens * kCols, 8), bias = floats(kRows, 9);
  const auto order = orders(1, kCols);
  auto out = floats(tokens * kRows, 10);
  const auto op = make_linear({.x = x.data(),
                               .weight = weight,
                               .input_order = tokens % 2 == 0 ? order.data() : nullptr,
                               .out = out.data(),
                               .bias = bias.data(),
                               .accumulate = true},
                              Rows(&tokens, tokens));
  run_op(*op);
  return out;
}

std::vector<float> moe(const std::string& format, int32_t tokens, Activation activation) {
  constexpr int64_t kExperts = 3, kTopK = 2, kHidden = 70, kInner = 41;
  const PackedMatrix up = describe_matrix(format, kInner, kHidden);
  const PackedMatrix down = describe_matrix(format, kHidden, kInner);
  const int64_t part = (up.nbytes() + 63) / 64 * 64;
  std::vector<std::vector<uint8_t>> blobs;
  std::vector<int64_t> pointers;
  for (uint32_t e = 0; e < kExperts; ++e) {
    blobs.push_back(bytes(2 * part + down.nbytes(), 20 + e));
    pointers.push_back(reinterpret_cast<int64_t>(blobs.back().data()));
  }
  std::vector<int32_t> ids;
  for (int32_t t = 0; t < tokens; ++t) {
    ids.push_back(t % 5 == 4 ? -1 : 1);
    ids.push_back(t % 3 == 0 ? 2 : 0);
  }
  const auto x = floats(tokens * kHidden, 11), weights = floats(tokens * kTopK, 12);
  const auto inner_bias = floats(kExperts * kInner, 13), bias = floats(kExperts * kHidden, 14);
  std::vector<float> out(size_t(tokens * kHidden));
  const ExpertArgs experts{.ids = ids.data(),
                           .weights = weights.data(),
                           .top_k = kTopK,
                           .pointers = pointers.data(),
                           .experts = kExperts,
                           .gate = {up, 0},
                           .up = {up, part},
                           .down = {down, 2 * part},
                           .input_orders = nullptr,
                           .gate_bias = inner_bias.data(),
                           .up_bias = inner_bias.data(),
                           .down_bias = bias.data(),
                           .activation = activation};
  const auto order = orders(kExperts, kHidden);
  ExpertArgs ordered = experts;
  ordered.input_orders = order.data();
  const auto op = make_moe({.x = x.data(),
                            .hidden = kHidden,
                            .groups = {experts, ordered},
                            .out = out.data(),
                            .accumulate = false},
                           Rows(&tokens, tokens));
  run_op(*op);
  return out;
}

// A prompt of 70 tokens in one sequence and one token in another; heads of 24 channels, or of
// 32 where only multiples of 16 are stored.
std::vector<float> attention(CacheType type) {
  constexpr int64_t kKvHeads = 2, kHeads = 6, kPage = 32, kPages = 5;
  const int64_t head_dim = type == CacheType::kInt8 ? 32 : 24;
  static constexpr int32_t kTokens = 71;
  std::vector<int32_t> positions, slots(kTokens, 0);
  for (int32_t t = 0; t < kTokens; ++t) positions.push_back(t);
  positions.back() = 0;
  slots.back() = 1;
  const std::vector<int32_t> table = {4, 0, 2, 3, 3, 3};
  const int64_t cache_bytes = kPages * kKvHeads * kPage * head_dim * cache_element_size(type);
  std::vector<std::byte> k_cache(static_cast<size_t>(cache_bytes)), v_cache(k_cache);
  std::vector<uint16_t> k_scale(size_t(kPages * kKvHeads * kPage) *
                                scale_groups(static_cast<int>(head_dim)));
  std::vector<uint16_t> v_scale(kPages * kKvHeads * kPage);
  const auto k = floats(kTokens * kKvHeads * head_dim, 15);
  auto q = floats(kTokens * kHeads * head_dim, 16);
  const auto sinks = floats(kHeads, 17), angle = floats(kTokens * 8, 18);
  const PagedCache cache{.k = k_cache.data(),
                         .v = v_cache.data(),
                         .k_scale = k_scale.data(),
                         .v_scale = v_scale.data(),
                         .type = type,
                         .pages = kPages,
                         .kv_heads = kKvHeads,
                         .page_size = kPage,
                         .head_dim = head_dim};
  const RaggedBatch batch{.positions = positions.data(),
                          .slots = slots.data(),
                          .page_table = table.data(),
                          .slot_count = 2,
                          .pages_per_slot = 3};
  std::vector<float> out(q.size());
  const Rows rows(&kTokens, kTokens);
  Program program;
  program.add(make_rope({.x = q.data(),
                         .positions = positions.data(),
                         .cos = angle.data(),
                         .sin = angle.data(),
                         .heads = kHeads,
                         .head_dim = head_dim,
                         .offset = 0,
                         .half = 8,
                         .max_positions = kTokens,
                         .interleaved = false},
                        rows));
  program.add(make_write_kv({.k = k.data(), .v = k.data(), .cache = cache, .batch = batch}, rows));
  program.add(make_attention({.q = q.data(),
                              .out = out.data(),
                              .cache = cache,
                              .batch = batch,
                              .sinks = sinks.data(),
                              .heads = kHeads,
                              .scale = 0.2f,
                              .window = 50,
                              .softcap = 0},
                             rows));
  program.replay();
  return out;
}

// Norm, activation, gather and router of rows that fill no register.
std::vector<float> rows_ops() {
  constexpr int64_t kWidth = 45;
  const int32_t tokens = 7;
  const Rows rows(&tokens, tokens);
  auto x = floats(tokens * kWidth, 19), residual = floats(tokens * kWidth, 20);
  const auto weight = floats(kWidth, 21);
  std::vector<float> out(x.size()), chosen(x.size()), weights(size_t(tokens) * 3);
  const std::vector<int32_t> index = {6, 0, 3, 3, 1, 5, 2};
  std::vector<int32_t> ids(size_t(tokens) * 3);
  Program program;
  program.add(make_rmsnorm({.x = x.data(),
                            .weight = weight.data(),
                            .out = out.data(),
                            .residual = residual.data(),
                            .width = kWidth,
                            .groups = 1,
                            .eps = 1e-5f},
                           rows));
  program.add(make_silu_mul(out.data(), residual.data(), out.data(), kWidth, rows));
  program.add(make_gather({.x = out.data(),
                           .indices = index.data(),
                           .out = chosen.data(),
                           .source_rows = tokens,
                           .width = kWidth},
                          rows));
  program.add(make_route({.logits = chosen.data(),
                          .ids = ids.data(),
                          .weights = weights.data(),
                          .rule = {.scoring = Scoring::kSigmoid,
                                   .bias = weight.data(),
                                   .experts = kWidth,
                                   .top_k = 3,
                                   .groups = 5,
                                   .top_groups = 2,
                                   .normalize = true,
                                   .scale = 2.5f}},
                         rows));
  program.add(make_sigmoid(chosen.data(), kWidth, rows));
  program.replay();
  chosen.insert(chosen.end(), weights.begin(), weights.end());
  return chosen;
}

std::vector<uint8_t> quantized(const std::string& format) {
  const PackedMatrix m = describe_matrix(format, kRows, kCols);
  const auto weight = floats(kRows * kCols, 22);
  std::vector<uint8_t> out(static_cast<size_t>(m.nbytes()));
  quantize({.weight = weight.data(),
            .type = FloatType::kF32,
            .matrix = m,
            .importance = nullptr,
            .out = out.data()});
  return out;
}

// What each op gives on the plainest table.
struct Expected {
  std::vector<std::vector<float>> linear, moe, attention;
  std::vector<float> rows;
  std::vector<std::vector<uint8_t>> quantized;
};

constexpr int32_t kTokens[] = {1, 3, 21};
constexpr CacheType kCaches[] = {CacheType::kF32, CacheType::kF16, CacheType::kBf16,
                                 CacheType::kInt8};

Expected run_all() {
  Expected found;
  for (const auto& format : format_names()) {
    for (const int32_t tokens : kTokens) found.linear.push_back(linear(format, tokens));
    found.moe.push_back(
        moe(format, 19, static_cast<Activation>(found.moe.size() % kActivationCount)));
    if (can_quantize(format)) found.quantized.push_back(quantized(format));
  }
  for (const CacheType type : kCaches) found.attention.push_back(attention(type));
  found.rows = rows_ops();
  return found;
}

// Float formats may round differently, and so may what is computed from caches of 16 bits.
void compare(const Expected& found, const Expected& expected, const std::string& isa) {
  size_t i = 0;
  for (const auto& format : format_names()) {
    const bool exact = !layout_facts(describe_matrix(format, 1, 1).kind).is_float;
    for (size_t t = 0; t < std::size(kTokens); ++t)
      check(!exact || same(found.linear[3 * i + t], expected.linear[3 * i + t]),
            "linear of " + format + " differs on " + isa);
    check(!exact || same(found.moe[i], expected.moe[i]), "moe of " + format + " differs on " + isa);
    ++i;
  }
  check(found.quantized == expected.quantized, "quantized bytes differ on " + isa);
  check(same(found.rows, expected.rows), "row ops differ on " + isa);
}

}  // namespace

void test_ops() {
  set_process_threads(2);
  set_isa("scalar");
  const Expected expected = run_all();
  std::vector<std::string> isas = supported_isas();
  for (const auto& name : emulated_isas()) isas.push_back(name);
  for (const auto& name : isas) {
    set_isa(name);
    compare(run_all(), expected, name);
  }
  set_isa("scalar");
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; ++c)
    callers.emplace_back([&] {
      for (int i = 0; i < 3; ++i)
        if (!same(rows_ops(), expected.rows) ||
            !same(attention(CacheType::kBf16), expected.attention[2]))
          ++wrong;
    });
  for (auto& caller : callers) caller.join();
  check(wrong == 0, "ops of several threads at once differ");
}

}  // namespace moestro_test

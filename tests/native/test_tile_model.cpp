// The model of the AMX tile registers against sums written from the definition, and its faults.
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "check.h"
#include "core/error.h"
#include "core/half.h"

namespace moestro {
namespace {
#include "micro/amx_tile.h"
//
#include "micro/amx_tile_emulated.h"
}  // namespace
}  // namespace moestro

namespace moestro_test {
namespace {

using moestro::bf16_to_f32;
using moestro::EmuTile;
using moestro::Error;
using moestro::f32_to_bf16;
using moestro::TileConfig;

constexpr int kC = 0, kA = 3, kB = 7;

TileConfig shapes(int rows, int depth, int colsb) {
  TileConfig config;
  config.set(kC, rows, colsb);
  config.set(kA, rows, depth);
  config.set(kB, depth / 4, colsb);
  return config;
}

template <class A, class B, class F>
void check_bytes(int rows, int depth, int colsb, const char* name, F&& multiply) {
  const int64_t stride_a = 64 + 3, stride_b = 64 + 5, stride_c = 64 + 16;
  const auto a = bytes(15 * stride_a + 64, 1), b = bytes(15 * stride_b + 64, 2);
  auto c = bytes(15 * stride_c + 64, 3);
  auto expected = c;
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < colsb / 4; ++n) {
      int32_t sum;
      std::memcpy(&sum, &c[size_t(m * stride_c + 4 * n)], 4);
      int64_t wide = sum;
      for (int k = 0; k < depth; ++k)
        wide += int64_t{static_cast<A>(a[size_t(m * stride_a + k)])} *
                static_cast<B>(b[size_t(k / 4 * stride_b + 4 * n + k % 4)]);
      const auto wrapped = static_cast<uint32_t>(wide);
      std::memcpy(&expected[size_t(m * stride_c + 4 * n)], &wrapped, 4);
    }
  EmuTile tile;
  tile.configure(shapes(rows, depth, colsb));
  tile.load<kA>(a.data(), stride_a);
  tile.load<kB>(b.data(), stride_b);
  tile.load<kC>(c.data(), stride_c);
  multiply(tile);
  tile.store<kC>(c.data(), stride_c);
  check(c == expected, std::string(name) + " differs");
}

void test_bytes() {
  for (const auto& [rows, depth, colsb] :
       {std::array{16, 64, 64}, {1, 4, 4}, {7, 32, 64}, {16, 16, 20}}) {
    check_bytes<int8_t, uint8_t>(rows, depth, colsb, "tdpbsud",
                                 [](EmuTile& t) { t.dot_su<kC, kA, kB>(); });
    check_bytes<uint8_t, int8_t>(rows, depth, colsb, "tdpbusd",
                                 [](EmuTile& t) { t.dot_us<kC, kA, kB>(); });
    check_bytes<uint8_t, uint8_t>(rows, depth, colsb, "tdpbuud",
                                  [](EmuTile& t) { t.dot_uu<kC, kA, kB>(); });
    check_bytes<int8_t, int8_t>(rows, depth, colsb, "tdpbssd",
                                [](EmuTile& t) { t.dot_ss<kC, kA, kB>(); });
  }
}

// One element: C += a[0] b[0] + a[1] b[1] + ..., pairs by pairs.
float pairs(float c, const std::vector<float>& a, const std::vector<float>& b) {
  uint16_t row[32] = {}, column[16][2] = {};
  for (size_t k = 0; k < a.size(); ++k) {
    row[k] = f32_to_bf16(a[k]);
    column[k / 2][k % 2] = f32_to_bf16(b[k]);
    check(bf16_to_f32(row[k]) == a[k] && bf16_to_f32(column[k / 2][k % 2]) == b[k],
          "the test needs bf16 numbers");
  }
  EmuTile tile;
  tile.configure(shapes(1, static_cast<int>(a.size() + 1) / 2 * 4, 4));
  tile.load<kA>(row, 64);
  tile.load<kB>(column, 4);
  tile.load<kC>(&c, 4);
  tile.dot_bf16<kC, kA, kB>();
  tile.store<kC>(&c, 4);
  return c;
}

void test_bf16() {
  const float tiny = 0x1p-126f, eps = 0x1p-23f;
  check(pairs(1, {2, 3}, {4, 5}) == 24, "a sum of two products");
  // Even and odd elements have a chain each: 2^24 + 1 would lose the 1 in a common one.
  check(pairs(0, {4096, 1, -4096, 1}, {4096, 1, 4096, 1}) == 2, "two chains");
  // C joins at the end and once: 2^24 + (1 + 1), not (2^24 + 1) + 1.
  check(pairs(0x1p24f, {1, 1}, {1, 1}) == 0x1p24f + 2, "C joins last");
  // Ties go to even.
  check(pairs(0, {1, 0, eps / 2, 0}, {1, 0, 1, 0}) == 1, "tie to even below");
  check(pairs(0, {1, 0, eps, 0, eps / 2, 0}, {1, 0, 1, 0, 1, 0}) == 1 + 2 * eps,
        "tie to even above");
  // Denormal operands and results are zero of their sign.
  check(pairs(0, {tiny / 2, 0}, {1024, 0}) == 0, "denormal A");
  check(pairs(tiny / 2, {0, 0}, {0, 0}) == 0, "denormal C");
  check(pairs(0, {tiny, 0}, {0.5, 0}) == 0, "denormal product");
  check(pairs(tiny * 1.5f, {-tiny, 0}, {1, 0}) == 0, "denormal sum");
  check(std::signbit(pairs(-0.0f, {-tiny, -tiny}, {0.5, 0.5})), "sign of a flushed product");
  check(pairs(0, {tiny, 0, tiny, 0}, {1, 0, 1, 0}) == 2 * tiny, "least normal numbers add");
  // Tiny is what is below 2^-126 when rounded to 24 bits: as a denormal, 2^-126 - 2^-150 would
  // round up to 2^-126.
  check(pairs(0, {tiny, 0, -0x1p-75f, 0}, {1, 0, 0x1p-75f, 0}) == 0, "tiny after rounding");
  check(pairs(0, {tiny, 0, -0x1p-76f, 0}, {1, 0, 0x1p-76f, 0}) == tiny, "rounded to the least");
  const float inf = std::numeric_limits<float>::infinity();
  check(pairs(0, {inf, 0}, {1, 0}) == inf, "infinity");
  check(std::isnan(pairs(0, {inf, 0}, {0, 0})), "infinity times zero");
  check(std::isnan(pairs(0, {inf, inf}, {1, -1})), "infinities of both signs");
  check(pairs(0, {0x1p127f, 0}, {2, 0}) == inf, "overflow");
}

void test_faults() {
  EmuTile tile;
  check_throws<Error>([&] { tile.zero<kC>(); }, "no shape");
  TileConfig config = shapes(16, 64, 64);
  config.rows[kC] = 17;
  check_throws<Error>([&] { tile.configure(config); }, "larger than 16 x 64");
  config = shapes(16, 64, 64);
  config.palette = 0;
  check_throws<Error>([&] { tile.configure(config); }, "palette");
  config = shapes(16, 64, 64);
  config.reserved[13] = 1;
  check_throws<Error>([&] { tile.configure(config); }, "reserved");
  config = shapes(16, 64, 64);
  config.set(8, 1, 4);
  check_throws<Error>([&] { tile.configure(config); }, "eight tiles");
  config = shapes(16, 64, 64);
  config.set(5, 0, 4);
  check_throws<Error>([&] { tile.configure(config); }, "rows without columns");
  config = shapes(16, 64, 64);
  config.set(kB, 8, 64);
  tile.configure(config);
  check_throws<Error>([&] { tile.dot_su<kC, kA, kB>(); }, "depth of A");
  config.set(kB, 16, 32);
  tile.configure(config);
  check_throws<Error>([&] { tile.dot_su<kC, kA, kB>(); }, "in columns");
  config.set(kB, 16, 64);
  config.set(kC, 8, 64);
  tile.configure(config);
  check_throws<Error>([&] { tile.dot_bf16<kC, kA, kB>(); }, "in rows");
}

}  // namespace

void test_tile_model() {
  test_bytes();
  test_bf16();
  test_faults();
}

}  // namespace moestro_test

// Experts that are read while others compute, from several workers: the same bits as from memory,
// and after a read that failed as well. A sanitizer watches the slots, the rounds and the waiting.
#include <cstring>
#include <memory>
#include <vector>

#include "algo/moe.h"
#include "algo/streamed_moe.h"
#include "check.h"
#include "core/team.h"
#include "formats/format.h"
#include "tiers/expert_cache.h"
#include "tiers/model_reader.h"

namespace moestro_test {
namespace {

using namespace moestro;

constexpr int64_t kExperts = 7, kTopK = 2, kHidden = 70, kInner = 41;
constexpr int32_t kTokens = 37;

struct Layer {
  PackedMatrix up = describe_matrix("int4-g32", kInner, kHidden);
  PackedMatrix down = describe_matrix("int4-g32", kHidden, kInner);
  int64_t part = (up.nbytes() + 63) / 64 * 64;
  int64_t blob = (2 * part + down.nbytes() + 4095) / 4096 * 4096;
  std::vector<uint8_t> file = std::vector<uint8_t>(size_t(kExperts * blob));
  std::vector<int64_t> pointers;
  std::vector<int32_t> ids = std::vector<int32_t>(size_t(kTokens * kTopK));
  std::vector<float> weights = floats(kTokens * kTopK, 2), x = floats(kTokens * kHidden, 3);
  std::vector<float> out = std::vector<float>(size_t(kTokens * kHidden));

  Layer() {
    for (int64_t e = 0; e < kExperts; ++e) {
      // Codes are any bytes, scales (16 halves before every 256 bytes of codes) are 2^-6.
      auto data = bytes(blob, uint32_t(20 + e));
      for (const int64_t start : {int64_t{0}, part, 2 * part})
        for (int64_t at = start; at + 288 <= blob && at < start + part; at += 288)
          for (int64_t c = 0; c < 16; ++c)
            data[size_t(at + 2 * c)] = 0, data[size_t(at + 2 * c + 1)] = 0x24;
      std::memcpy(file.data() + e * blob, data.data(), data.size());
      pointers.push_back(reinterpret_cast<int64_t>(file.data() + e * blob));
    }
  }

  void route(uint32_t seed) {
    Random random(seed);
    for (size_t i = 0; i < ids.size(); i += 2) {
      ids[i] = int32_t(random.bits() % kExperts);
      ids[i + 1] = int32_t((uint32_t(ids[i]) + 1 + random.bits() % (kExperts - 1)) % kExperts);
    }
  }

  MoeArgs args(bool in_memory) {
    const ExpertArgs experts{.ids = ids.data(),
                             .weights = weights.data(),
                             .top_k = kTopK,
                             .pointers = in_memory ? pointers.data() : nullptr,
                             .experts = kExperts,
                             .gate = {up, 0},
                             .up = {up, part},
                             .down = {down, 2 * part},
                             .input_orders = nullptr,
                             .gate_bias = nullptr,
                             .up_bias = nullptr,
                             .down_bias = nullptr,
                             .activation = activation_named("silu")};
    return {.x = x.data(),
            .hidden = kHidden,
            .groups = {experts},
            .out = out.data(),
            .accumulate = false};
  }
};

void same_as_in_memory(Layer& layer, int64_t slots, int threads) {
  set_process_threads(threads);
  const auto whole = make_moe(layer.args(true), Rows(&kTokens, kTokens));
  struct alignas(4096) Page {
    std::byte bytes[4096];
  };
  const auto memory = std::make_unique<Page[]>(size_t(slots * layer.blob / 4096));
  const auto reader = std::make_shared<ModelReader>(
      std::vector<std::span<const std::byte>>{std::as_bytes(std::span(layer.file))},
      uint32_t(slots));
  const auto cache = std::make_shared<ExpertCache>(reader, BlobFile{0, 0, layer.blob},
                                                   memory[0].bytes, slots, kExperts, "auto", 3);
  const auto streamed = make_streamed_moe(layer.args(false), Rows(&kTokens, kTokens), cache);
  for (uint32_t seed = 0; seed < 12; ++seed) {
    layer.route(seed);
    if (seed % 4 == 3 && slots < kExperts) {
      reader->fail_after(seed % 3);
      check_throws<Error>(
          [&] {
            for (uint32_t other = 0; other < 20; ++other) {
              layer.route(other);
              run_op(*streamed);
            }
          },
          "as asked");
      layer.route(seed);
    }
    run_op(*whole);
    const std::vector<float> expected = layer.out;
    layer.out.assign(layer.out.size(), -1.0f);
    run_op(*streamed);
    check(std::memcmp(layer.out.data(), expected.data(), expected.size() * sizeof(float)) == 0,
          "streamed experts give other bits with " + std::to_string(slots) + " slots");
  }
}

}  // namespace

void test_streamed_moe() {
  const int before = process_threads();
  Layer layer;
  for (const int threads : {1, 2, 4})
    for (const int64_t slots : {1, 3, 7}) same_as_in_memory(layer, slots, threads);
  set_process_threads(before);
}

}  // namespace moestro_test

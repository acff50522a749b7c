// What the native tests share: failures as exceptions, and numbers from a fixed sequence.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace moestro_test {

inline void check(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

// Runs f, which must throw an E whose message holds `part`.
template <class E, class F>
void check_throws(F&& f, const std::string& part) {
  try {
    f();
  } catch (const E& error) {
    check(std::string(error.what()).find(part) != std::string::npos,
          "an error says '" + std::string(error.what()) + "', not '" + part + "'");
    return;
  }
  throw std::runtime_error("nothing was thrown where '" + part + "' was expected");
}

// xorshift32
class Random {
 public:
  explicit Random(uint32_t seed) : state_(seed * 2654435761u + 1) {}
  uint32_t bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 17;
    return state_ ^= state_ << 5;
  }
  float uniform() { return static_cast<float>(bits() >> 8) * 0x1p-23f - 1.0f; }  // -1 to 1

 private:
  uint32_t state_;
};

// Exactly n elements on the heap, so that a sanitizer sees the first access beyond them.
inline std::vector<float> floats(int64_t n, uint32_t seed) {
  std::vector<float> values(static_cast<size_t>(n));
  Random random(seed);
  for (float& value : values) value = random.uniform();
  return values;
}
inline std::vector<uint8_t> bytes(int64_t n, uint32_t seed) {
  std::vector<uint8_t> values(static_cast<size_t>(n));
  Random random(seed);
  for (uint8_t& value : values) value = static_cast<uint8_t>(random.bits() >> 24);
  return values;
}

void test_tile_model();
void test_ops();
void test_reader();
void test_streamed_moe();
void test_streams();
void test_team();

}  // namespace moestro_test

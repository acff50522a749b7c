// Random pauses that bring races to light in tests; none by default.
#pragma once

#include <chrono>
#include <cstdint>
#include <random>
#include <thread>

namespace moestro {

class Delays {
 public:
  // Of up to max_us microseconds each.
  explicit Delays(uint32_t seed = 0, int max_us = 0) : random_(seed + 1), max_us_(max_us) {}

  bool any() const { return max_us_ > 0; }
  void pause() {
    if (any())
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % (uint64_t(max_us_) + 1)));
  }

 private:
  std::minstd_rand random_;
  int max_us_;
};

}  // namespace moestro

// Checks of index data that ops read when they run.
#pragma once

#include <cstdint>
#include <string>

#include "core/error.h"

namespace moestro {

// Throws InvalidRequest naming the first of values [n] outside 0..limit-1. An op lets every worker
// check before any of them writes, so that a refused step leaves its buffers as they were.
inline void require_indices(const char* what, const int32_t* values, int64_t n, int64_t limit) {
  for (int64_t i = 0; i < n; ++i)
    if (values[i] < 0 || values[i] >= limit)
      throw invalid_request(std::string(what) + " " + std::to_string(values[i]) + " of row " +
                            std::to_string(i) + " is outside 0.." + std::to_string(limit - 1));
}

}  // namespace moestro

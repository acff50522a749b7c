// The machine's own limits, measured with the active kernel table and the process's team.
#pragma once

#include <cstdint>

namespace moestro {

// Bytes per second read from `nbytes` of memory (hugepages advised; kept between calls).
double probe_read(int64_t nbytes);
// Operations per second of integer dots, of float32 fused multiply-adds and of bfloat16 products.
double probe_dot();
double probe_fma();
double probe_bf16();

}  // namespace moestro

// Floats in and out of tiles: gathering rows into lanes, float formats, and the error of what was
// stored. Included in the anonymous namespace of each ISA.
#pragma once

// Sums the squared error of what was stored, over channels that are not padding.
struct Loss {
  QuantizeJob& job;

  // Channels first..first+n of the tile (n at most 32): decoded(k), k counting from first.
  template <class Decoded>
  void add(int first, int n, Decoded decoded) {
    F32 error = f_zero(), norm = f_zero();
    for (int k = 0; k < std::min(n, job.valid - first); ++k) {
      const F32 x = f_load(job.x + (first + k) * kLanes), residual = f_sub(x, decoded(k));
      error = f_add(error, f_mul(residual, residual));
      norm = f_add(norm, f_mul(x, x));
    }
    job.error += sum(error);
    job.norm += sum(norm);
  }

  static double sum(F32 v) {
    float lanes[kLanes];
    f_store(lanes, v);
    double total = 0;
    for (const float lane : lanes) total += lane;
    return total;
  }
};

inline void store_halves(uint8_t* to, F32 v) {
  uint16_t halves[kLanes];
  f_store_f16(halves, v);
  std::memcpy(to, halves, sizeof halves);
}

void quantize_f32(QuantizeJob& job) {
  for (int k = 0; k < job.group; ++k) std::memcpy(job.tile + k * 64, job.x + k * kLanes, 64);
  Loss{job}.add(0, job.group, [&](int k) { return f_load(job.x + k * kLanes); });
}

void quantize_f16(QuantizeJob& job) {
  for (int k = 0; k < job.group; ++k) store_halves(job.tile + k * 32, f_load(job.x + k * kLanes));
  float largest = 0;
  Loss{job}.add(0, job.group, [&](int k) {
    const F32 stored = to_f16(f_load(job.x + k * kLanes));
    largest = std::max(largest, f_max_lane(f_abs(stored)));
    return stored;
  });
  job.lost = std::isinf(largest);
}

void quantize_bf16(QuantizeJob& job) {
  float largest = 0;
  uint16_t rows[kBlockChannels][kLanes];
  Loss{job}.add(0, job.group, [&](int k) {
    f_store_bf16(rows[k], f_load(job.x + k * kLanes));
    const F32 stored = f_load_bf16(rows[k]);
    largest = std::max(largest, f_max_lane(f_abs(stored)));
    return stored;
  });
  for (int k = job.valid; k < job.group; ++k) std::memset(rows[k], 0, sizeof rows[k]);
  for (int k = 0; k < job.group; ++k)
    for (int c = 0; c < kLanes; ++c)
      std::memcpy(job.tile + (k / 2 * 32 + c * 2 + k % 2) * 2, &rows[k][c], 2);
  job.lost = std::isinf(largest);
}

inline F32 load_floats(const void* row, FloatType type, int k) {
  switch (type) {
    case FloatType::kF32:
      return f_load(static_cast<const float*>(row) + k);
    case FloatType::kF16:
      return f_load_f16(static_cast<const uint16_t*>(row) + k);
    case FloatType::kBf16:
      break;
  }
  return f_load_bf16(static_cast<const uint16_t*>(row) + k);
}

inline float load_float(const void* row, FloatType type, int k) {
  switch (type) {
    case FloatType::kF32:
      return static_cast<const float*>(row)[k];
    case FloatType::kF16:
      return f16_to_f32(static_cast<const uint16_t*>(row)[k]);
    case FloatType::kBf16:
      break;
  }
  return bf16_to_f32(static_cast<const uint16_t*>(row)[k]);
}

bool gather_lanes(const void* const* rows, FloatType type, int n, float* x) {
  I32 largest = i_set1(0);
  for (int c = 0; c < kLanes; ++c) {
    int k = 0;
    float lanes[kLanes];
    for (; k + kLanes <= n; k += kLanes) {
      const F32 v = load_floats(rows[c], type, k);
      // As integers the bits of magnitudes have the order of their values, NaN above infinity.
      largest = i_max(largest, i_bits(f_abs(v)));
      f_store(lanes, v);
      for (int i = 0; i < kLanes; ++i) x[(k + i) * kLanes + c] = lanes[i];
    }
    for (; k < n; ++k) {
      const float v = load_float(rows[c], type, k);
      largest = i_max(largest, i_set1(std::bit_cast<int32_t>(v) & 0x7fffffff));
      x[k * kLanes + c] = v;
    }
  }
  return i_max_lane(largest) < 0x7f800000;
}

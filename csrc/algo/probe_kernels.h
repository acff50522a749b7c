// Kernels that measure the machine's own limits in the same way the real ones load it. Included in
// each ISA's anonymous namespace.
#pragma once

// The best of several distances measured on Zen 4.
constexpr int64_t kProbePrefetchBytes = 4096;

uint64_t read_bytes(const uint8_t* p, int64_t n) {
  U8 sum[4];
  for (auto& s : sum) s = u8_load(p);
  for (int64_t i = 0; i + 256 <= n; i += 256) {
    for (int j = 0; j < 4; ++j) {
      prefetch(p + i + 64 * j + kProbePrefetchBytes);
      sum[j] = u8_xor(sum[j], u8_load(p + i + 64 * j));
    }
  }
  uint8_t bytes[64];
  u8_store(bytes, u8_xor(u8_xor(sum[0], sum[1]), u8_xor(sum[2], sum[3])));
  uint64_t low;
  std::memcpy(&low, bytes, 8);
  return low;
}

constexpr int kChains = 12;

int64_t dot_peak(int64_t rounds) {
  uint8_t codes[64];
  int8_t bytes[4] = {1, 2, 3, 4};
  for (int i = 0; i < 64; ++i) codes[i] = static_cast<uint8_t>(i % 16);
  U8 w = u8_load(codes);
  const Quad x = quad_load(bytes);
  Acc<4> acc[kChains];
  for (auto& a : acc) a = Acc<4>::start(0);
  for (int64_t r = 0; r < rounds; ++r)
    for (auto& a : acc) {
      opaque(w);
      a.dot(w, x);
    }
  for (auto& a : acc) {
    F32 result = f_from_i(a.result(0));
    opaque(result);  // every chain counts, so none may be dropped
  }
  return rounds * kChains * 64;
}

int64_t fma_peak(int64_t rounds) {
  F32 a = f_set1(1e-9f);
  const F32 b = f_set1(0.5f);
  F32 acc[kChains];
  for (auto& c : acc) c = f_zero();
  for (int64_t r = 0; r < rounds; ++r)
    for (auto& c : acc) {
      opaque(a);
      c = f_fma(a, b, c);
    }
  for (auto& c : acc) opaque(c);
  return rounds * kChains * 16;
}

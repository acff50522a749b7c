// Leaf kernels that store a position's key and value in the paged cache. Included in the anonymous
// namespace of each ISA.
#pragma once

#include "algo/attention_codes.h"

// x [n] narrowed to the cache's type, in memory for n rounded up to 16.
inline void narrow(CacheType type, const float* x, int n, std::byte* to) {
  const int64_t size = cache_element_size(type);
  for (int i = 0; i < n; i += 16) {
    const F32 v = n - i >= 16 ? f_load(x + i) : f_load_n(x + i, n - i);
    std::byte* p = to + i * size;
    if (type == CacheType::kF32) f_store(reinterpret_cast<float*>(p), v);
    if (type == CacheType::kF16) f_store_f16(reinterpret_cast<uint16_t*>(p), v);
    if (type == CacheType::kBf16) f_store_bf16(reinterpret_cast<uint16_t*>(p), v);
  }
}

template <class T>
inline void spread(const std::byte* from, int n, std::byte* to) {
  const T* x = reinterpret_cast<const T*>(from);
  T* lane = reinterpret_cast<T*>(to);
  for (int i = 0; i < n; ++i) lane[i * kKeyLanes] = x[i];
}

inline void store_numbers(const KvHead& head, int64_t position, const float* k, const float* v) {
  alignas(64) std::byte narrowed[kMaxHeadDim * sizeof(float)];
  const int n = head.head_dim;
  const int64_t size = cache_element_size(head.type), offset = position % head.page_size;
  const int64_t page = head.pages[position / head.page_size] * head.page_bytes;
  narrow(head.type, k, n, narrowed);
  const int64_t tile = offset / kKeyLanes * kKeyLanes * n;
  std::byte* lane = head.k + page + (tile + offset % kKeyLanes) * size;
  if (head.type == CacheType::kF32) {
    spread<float>(narrowed, n, lane);
  } else {
    spread<uint16_t>(narrowed, n, lane);
  }
  narrow(head.type, v, n, narrowed);
  std::memcpy(head.v + page + offset * n * size, narrowed, static_cast<size_t>(n * size));
}

// The scale of x [n], n a multiple of 16, as bfloat16: amax / 127 rounded up, so that no code
// leaves -127..127.
inline uint16_t scale_of(const float* x, int n) {
  I32 bits = i_set1(0);
  for (int i = 0; i < n; i += 16) bits = max_magnitude(bits, f_load(x + i));
  const float amax = magnitude(bits);
  if (!(amax <= kLargestFloat)) return amax == amax ? 0x7f80 : 0x7fc0;
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(amax / 127.0f) + 0xffffu) >> 16);
}

// x [n] as code + 128, channel c at (c / 4) * quad_bytes + c % 4 of `to`; returns the scale.
inline uint16_t store_codes(const float* x, int n, int64_t quad_bytes, uint8_t* to) {
  alignas(64) int8_t codes[kMaxHeadDim];
  const uint16_t scale = scale_of(x, n);
  quantize_codes(x, n, bf16_to_f32(scale), codes);
  for (int c = 0; c < n; ++c) to[c / 4 * quad_bytes + c % 4] = static_cast<uint8_t>(codes[c] + 128);
  return scale;
}

inline void store_bytes(const KvHead& head, int64_t position, const float* k, const float* v) {
  const int n = head.head_dim, groups = scale_groups(n);
  const int64_t offset = position % head.page_size, page = head.pages[position / head.page_size];
  const int64_t tile = offset / kKeyLanes, lane = offset % kKeyLanes;
  uint8_t* keys = reinterpret_cast<uint8_t*>(head.k) + page * head.page_bytes;
  uint16_t* scales = head.k_scale + page * head.k_scale_page + tile * groups * kKeyLanes + lane;
  keys += tile * kKeyLanes * n + lane * 4;
  for (int g = 0, c = 0; c < n; ++g, c += kScaleKeys)
    scales[g * kKeyLanes] =
        store_codes(k + c, std::min(kScaleKeys, n - c), kKeyLanes * 4, keys + c * kKeyLanes);
  uint8_t* values = reinterpret_cast<uint8_t*>(head.v) + page * head.page_bytes;
  values += offset / 4 * 4 * n + offset % 4;
  // Channel by channel, four keys side by side: the transpose of how keys lie.
  alignas(64) uint8_t codes[kMaxHeadDim];
  head.v_scale[page * head.v_scale_page + offset] = store_codes(v, n, 4, codes);
  for (int c = 0; c < n; ++c) values[c * 4] = codes[c];
}

inline void store_position(const KvHead& head, int64_t position, const float* k, const float* v) {
  if (head.type == CacheType::kInt8) return store_bytes(head, position, k, v);
  store_numbers(head, position, k, v);
}

// Quantizes one tile per call. Included in the anonymous namespace of each ISA.
#pragma once

#include "algo/pack_search.h"
//
#include "algo/pack_floats.h"

// Where trials place the extreme, as in src/moestro/formats: whole levels so that weights which
// already lie on a grid are found exactly, finer ones around the ends of the range, and beyond it
// (clipping) for groups wider than 32.
constexpr float kInt4Levels[] = {
    -1, -2,    -3,   -4,    -5, -6,    -7,    -7.25f, -7.5f,  -7.75f, -8,  -8.25f, -8.5f,  -8.75f,
    -9, 7.25f, 7.5f, 7.75f, 8,  8.25f, -9.5f, -10,    -10.5f, -11,    -12, -13,    -14.5f, -16};
constexpr int kInt4NarrowLevels = 20;
constexpr float kInt8Levels[] = {-128, -127, -126, -125, -124, -123, -122, -121};
constexpr float kSpreadLevels[] = {1,  2,  3,     4,  5,     6,  7,     8,  9,     10, 11,
                                   12, 13, 13.5f, 14, 14.5f, 15, 15.5f, 16, 16.5f, 17, 17.5f};

struct K4Search {
  static constexpr int kSteps = 18, kDivisors = 25;
  float levels[kSteps];
  float divisors[kDivisors];
  constexpr K4Search() : levels{}, divisors{} {
    for (int i = 0; i < kSteps; ++i) levels[i] = static_cast<float>(12 + i / 3.0);
    int n = 0;
    for (int d = 63; d > 44; --d) divisors[n++] = static_cast<float>(d);
    for (int d = 32; d > 0; d /= 2) divisors[n++] = static_cast<float>(d);
  }
};
constexpr K4Search kK4Search;

struct K6Search {
  static constexpr int kSteps = 24, kDivisors = 35;
  float levels[kSteps];
  float divisors[kDivisors];
  constexpr K6Search() : levels{}, divisors{} {
    for (int i = 0; i < 20; ++i) levels[i] = static_cast<float>(-24 - i / 2.0);
    for (int i = 0; i < 4; ++i) levels[20 + i] = static_cast<float>(31.5 + i / 2.0);
    int n = 0;
    for (int d = -128; d < -104; ++d) divisors[n++] = static_cast<float>(d);
    for (int d = 127; d > 123; --d) divisors[n++] = static_cast<float>(d);
    for (int i = 0; i < 7; ++i) divisors[n++] = static_cast<float>(-(1 << i));
  }
};
constexpr K6Search kK6Search;

// Codes of four channels from k on, in the bytes of each lane's word; `codes` are whole floats.
inline I32 code_word(const float* codes, int k) {
  const auto byte = [&](int i) { return i_from_f(f_load(codes + (k + i) * kLanes)); };
  return i_add(i_add(byte(0), i_shift_left<8>(byte(1))),
               i_add(i_shift_left<16>(byte(2)), i_shift_left<24>(byte(3))));
}

inline void store_words(uint8_t* to, I32 words) {
  int32_t lanes[kLanes];
  i_store(lanes, words);
  std::memcpy(to, lanes, sizeof lanes);
}

// 32 channels of 4-bit codes: channel k low, channel k + 16 high.
inline void store_nibbles(uint8_t* block, const float* codes) {
  for (int j = 0; j < 4; ++j)
    store_words(block + j * 64,
                i_add(code_word(codes, 4 * j), i_shift_left<4>(code_word(codes, 16 + 4 * j))));
}

inline void store_bytes(uint8_t* to, F32 v) {
  int32_t lanes[kLanes];
  i_store(lanes, i_from_f(v));
  for (int c = 0; c < kLanes; ++c) to[c] = static_cast<uint8_t>(lanes[c]);
}

// code(k) of all channels into job.codes and, block by block, into the tile.
template <int kHeader, int kBlock, class Code, class Decoded>
inline void finish(QuantizeJob& job, Code code, Decoded decoded) {
  Loss loss{job};
  for (int first = 0; first < job.group; first += kBlockChannels) {
    float* codes = job.codes + first * kLanes;
    for (int k = 0; k < kBlockChannels; ++k) f_store(codes + k * kLanes, code(first + k));
    uint8_t* block = job.tile + kHeader + first / kBlockChannels * kBlock;
    if constexpr (kBlock == Int8Layout::kBlock) {
      for (int j = 0; j < 8; ++j) store_words(block + j * 64, code_word(codes, 4 * j));
    } else {
      store_nibbles(block, codes);
    }
    loss.add(first, kBlockChannels, [&](int k) { return decoded(f_load(codes + k * kLanes)); });
  }
}

template <int kZero, int kBlock>
inline void quantize_symmetric(QuantizeJob& job, Levels levels) {
  const Group g{job.x, job.w, job.group};
  const float lo = -kZero, hi = kZero - 1;
  const F32 zero = f_set1(kZero);
  const F32 scale = fit_symmetric(g, job.codes, lo, hi, levels, to_f16, job.lost);
  const F32 factor = reciprocal(scale);
  store_halves(job.tile, scale);
  finish<32, kBlock>(
      job, [&](int k) { return f_add(round_clamp(f_mul(g.at(k), factor), lo, hi), zero); },
      [&](F32 code) { return f_mul(f_sub(code, zero), scale); });
}

void quantize_int8(QuantizeJob& job) {
  quantize_symmetric<128, Int8Layout::kBlock>(job, {kInt8Levels, std::size(kInt8Levels)});
}

void quantize_int4(QuantizeJob& job) {
  const bool narrow = job.group == kBlockChannels;
  const int count = narrow ? kInt4NarrowLevels : static_cast<int>(std::size(kInt4Levels));
  quantize_symmetric<8, Int4Layout::kBlock>(job, {kInt4Levels, count});
}

void quantize_int4_zero(QuantizeJob& job) {
  const Group g{job.x, job.w, job.group};
  const auto [scale, zero] =
      fit_zero_point(g, job.codes, 15, {kSpreadLevels, std::size(kSpreadLevels)}, job.lost);
  const F32 s = scale, z = zero, factor = reciprocal(scale);
  store_halves(job.tile, s);
  store_bytes(job.tile + 32, z);
  finish<Int4ZeroLayout::kHeader, Int4ZeroLayout::kBlock>(
      job,
      [&](int k) {
        const F32 steps = round_clamp(f_mul(g.at(k), factor), -64, 64);
        return f_min(f_max(f_add(steps, z), f_zero()), f_set1(15));
      },
      [&](F32 code) { return f_mul(f_sub(code, z), s); });
}

void quantize_int4_min(QuantizeJob& job) {
  const Group g{job.x, job.w, job.group};
  const Pair fit = fit_affine<false>(g, job.codes, 15, {kSpreadLevels, std::size(kSpreadLevels)},
                                     to_f16, job.lost);
  const F32 factor = reciprocal(fit.a);
  store_halves(job.tile, fit.a);
  store_halves(job.tile + 32, fit.b);
  finish<Int4MinLayout::kHeader, Int4MinLayout::kBlock>(
      job, [&](int k) { return round_clamp(f_mul(f_sub(g.at(k), fit.b), factor), 0, 15); },
      [&](F32 code) { return f_add(f_mul(code, fit.a), fit.b); });
}

inline F32 step_within(F32 v, float step, float lo, float hi) {
  return f_min(f_max(f_add(v, f_set1(step)), f_set1(lo)), f_set1(hi));
}

// Of the scale and minimum of 32 channels and their neighbours one step away, those of least true
// error: (scale, minimum) as integers.
inline Pair best_neighbours(const Group& g, F32 d, F32 dmin, F32 sc, F32 m) {
  Pair best{f_zero(), f_zero()};
  F32 best_error = sum_of_squares(g);
  for (const float ds : {0.0f, -1.0f, 1.0f})
    for (const float dm : {0.0f, -1.0f, 1.0f}) {
      const Pair trial{step_within(sc, ds, 0, 63), step_within(m, dm, 0, 63)};
      const F32 scale = f_mul(d, trial.a), low = f_mul(dmin, trial.b), factor = reciprocal(scale);
      const F32 error = squared_error(g, [&](int k) {
        const F32 code = round_clamp(f_mul(f_add(g.at(k), low), factor), 0, 15);
        return f_sub(f_mul(code, scale), low);
      });
      best.a = f_select_lt(error, best_error, trial.a, best.a);
      best.b = f_select_lt(error, best_error, trial.b, best.b);
      best_error = f_select_lt(error, best_error, error, best_error);
    }
  return best;
}

void quantize_k4(QuantizeJob& job) {
  constexpr int kSubs = K4Layout::kTileBlocks;
  alignas(64) float scales[kSubs * kLanes], lows[kSubs * kLanes];
  alignas(64) float scale_weights[kSubs * kLanes], low_weights[kSubs * kLanes];
  const auto sub = [&](int s) {
    return Group{job.x + s * kBlockChannels * kLanes,
                 job.w == nullptr ? nullptr : job.w + s * kBlockChannels, kBlockChannels};
  };
  for (int s = 0; s < kSubs; ++s) {
    const Group g = sub(s);
    const Pair fit = fit_affine<true>(g, job.codes, 15, {kK4Search.levels, K4Search::kSteps},
                                      keep_f32, job.lost);
    const F32 factor = reciprocal(fit.a);
    f_store(scales + s * kLanes, fit.a);
    f_store(lows + s * kLanes, f_sub(f_zero(), fit.b));
    // An error in a scale costs in proportion to its codes squared, one in a minimum to the number
    // of channels (their total weight).
    const Pair weights = group_sums(g.n, [&](int k) {
      const F32 code = round_clamp(f_mul(f_sub(g.at(k), fit.b), factor), 0, 15);
      return Pair{g.weigh(f_mul(code, code), k), g.weigh(f_set1(1.0f), k)};
    });
    f_store(scale_weights + s * kLanes, weights.a);
    f_store(low_weights + s * kLanes, weights.b);
  }
  const Levels divisors{kK4Search.divisors, K4Search::kDivisors};
  const F32 d =
      fit_shared_scale({scales, nullptr, kSubs}, scale_weights, 0, 63, divisors, job.lost);
  const F32 dmin = fit_shared_scale({lows, nullptr, kSubs}, low_weights, 0, 63, divisors, job.lost);
  const F32 d_inverse = reciprocal(d), dmin_inverse = reciprocal(dmin);
  store_halves(job.tile, d);
  store_halves(job.tile + 32, dmin);
  Loss loss{job};
  for (int s = 0; s < kSubs; ++s) {
    const Group g = sub(s);
    const Pair grid = best_neighbours(
        g, d, dmin, round_clamp(f_mul(f_load(scales + s * kLanes), d_inverse), 0, 63),
        round_clamp(f_mul(f_load(lows + s * kLanes), dmin_inverse), 0, 63));
    store_bytes(job.tile + 64 + s * 16, grid.a);
    store_bytes(job.tile + 192 + s * 16, grid.b);
    const F32 scale = f_mul(d, grid.a), low = f_mul(dmin, grid.b), factor = reciprocal(scale);
    for (int k = 0; k < kBlockChannels; ++k)
      f_store(job.codes + k * kLanes, round_clamp(f_mul(f_add(g.at(k), low), factor), 0, 15));
    store_nibbles(job.tile + K4Layout::kHeader + s * K4Layout::kBlock, job.codes);
    loss.add(s * kBlockChannels, kBlockChannels,
             [&](int k) { return f_sub(f_mul(f_load(job.codes + k * kLanes), scale), low); });
  }
}

// Of an integer scale of 16 channels and its two neighbours the one of least true error.
inline F32 best_neighbour(const Group& g, F32 d, F32 sc) {
  Best best{sum_of_squares(g), f_zero()};
  for (const float step : {0.0f, -1.0f, 1.0f}) {
    const F32 trial = step_within(sc, step, -128, 127);
    const F32 scale = f_mul(d, trial), factor = reciprocal(scale);
    const F32 error = squared_error(
        g, [&](int k) { return f_mul(round_clamp(f_mul(g.at(k), factor), -32, 31), scale); });
    best.consider(error, trial);
  }
  return best.scale;
}

// The upper two bits of 32 six-bit codes: byte h * 64 + c * 4 + i, bits 2jj.. of channel
// 4 (4h + jj) + i.
inline void store_high_bits(uint8_t* to, const float* codes) {
  const I32 mask = i_set1(0x03030303);
  const auto high = [&](int k) { return i_and(i_shift_right<4>(code_word(codes, k)), mask); };
  for (int h = 0; h < 2; ++h) {
    const int k = 16 * h;
    store_words(to + h * 64,
                i_add(i_add(high(k), i_shift_left<2>(high(k + 4))),
                      i_add(i_shift_left<4>(high(k + 8)), i_shift_left<6>(high(k + 12)))));
  }
}

void quantize_k6(QuantizeJob& job) {
  constexpr int kSub = 16, kSubs = 16;
  alignas(64) float scales[kSubs * kLanes], weights[kSubs * kLanes];
  const auto sub = [&](int s) {
    return Group{job.x + s * kSub * kLanes, job.w == nullptr ? nullptr : job.w + s * kSub, kSub};
  };
  for (int s = 0; s < kSubs; ++s) {
    const Group g = sub(s);
    const F32 scale = fit_symmetric(g, job.codes, -32, 31, {kK6Search.levels, K6Search::kSteps},
                                    keep_f32, job.lost);
    const F32 factor = reciprocal(scale);
    f_store(scales + s * kLanes, scale);
    f_store(weights + s * kLanes, group_sum(g.n, [&](int k) {
              const F32 code = round_clamp(f_mul(g.at(k), factor), -32, 31);
              return g.weigh(f_mul(code, code), k);
            }));
  }
  const F32 d = fit_shared_scale({scales, nullptr, kSubs}, weights, -128, 127,
                                 {kK6Search.divisors, K6Search::kDivisors}, job.lost);
  const F32 d_inverse = reciprocal(d), zero = f_set1(32), sixteen = f_set1(16);
  store_halves(job.tile, d);
  Loss loss{job};
  float low[kBlockChannels * kLanes];
  for (int s = 0; s < kSubs; ++s) {
    const Group g = sub(s);
    const F32 sc =
        best_neighbour(g, d, round_clamp(f_mul(f_load(scales + s * kLanes), d_inverse), -128, 127));
    store_bytes(job.tile + 32 + s * 16, sc);
    const F32 scale = f_mul(d, sc), factor = reciprocal(scale);
    float* codes = job.codes + s % 2 * kSub * kLanes;
    for (int k = 0; k < kSub; ++k) {
      const F32 code = f_add(round_clamp(f_mul(g.at(k), factor), -32, 31), zero);
      f_store(codes + k * kLanes, code);
      // code mod 16: whole sixteenths, found by rounding down halfway between them.
      const F32 above = f_from_i(i_from_f(f_sub(f_mul(code, f_set1(0.0625f)), f_set1(0.46875f))));
      f_store(low + (s % 2 * kSub + k) * kLanes, f_sub(code, f_mul(above, sixteen)));
    }
    loss.add(s * kSub, kSub,
             [&](int k) { return f_mul(f_sub(f_load(codes + k * kLanes), zero), scale); });
    if (s % 2 == 0) continue;
    uint8_t* block = job.tile + K6Layout::kHeader + s / 2 * K6Layout::kBlock;
    store_nibbles(block, low);
    store_high_bits(block + 256, job.codes);
  }
}

constexpr PackKernels make_pack_kernels() {
  PackKernels kernels{};
  kernels.gather = gather_lanes;
  const auto set = [&](FormatKind kind, void (*quantize)(QuantizeJob&)) {
    kernels.quantize[static_cast<int>(kind)] = quantize;
  };
  set(FormatKind::kF32, quantize_f32);
  set(FormatKind::kF16, quantize_f16);
  set(FormatKind::kBf16, quantize_bf16);
  set(FormatKind::kInt8, quantize_int8);
  set(FormatKind::kInt4, quantize_int4);
  set(FormatKind::kInt4Zero, quantize_int4_zero);
  set(FormatKind::kInt4Min, quantize_int4_min);
  set(FormatKind::kK4, quantize_k4);
  set(FormatKind::kK6, quantize_k6);
  return kernels;
}

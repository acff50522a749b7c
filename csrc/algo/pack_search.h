// Error-minimizing scales, sixteen output channels at a time: lane c of every vector belongs to
// channel c, so nothing is summed across lanes and all instruction sets give the same bits. A trial
// places the group's extreme on some level, rounds all values to codes, fits the scale to those
// codes by least squares, rounds the scale as it will be stored, and measures the true error with
// it. src/moestro/formats/search.py holds the same search for one matrix at a time; the two agree
// to the bit, so the order of operations here is theirs. Included in the anonymous namespace of
// each ISA.
#pragma once

// Half of float16's smallest positive number: a group of smaller values is best stored as zero.
constexpr float kTiny = 0x1p-25f;

// Values of one group, [n][16], with the weight of each squared error ([n] or null).
struct Group {
  const float* x;
  const float* w;
  int n;

  F32 at(int k) const { return f_load(x + k * kLanes); }
  F32 weigh(F32 v, int k) const { return w == nullptr ? v : f_mul(v, f_set1(w[k])); }
};

// Sums term(k) over a group: in order within 32 channels, then over those sums in order.
template <class Term>
inline F32 group_sum(int n, Term term) {
  F32 total = f_zero();
  for (int first = 0; first < n; first += kBlockChannels) {
    const int last = std::min(first + kBlockChannels, n);
    F32 part = f_zero();
    for (int k = first; k < last; ++k) part = f_add(part, term(k));
    total = f_add(total, part);
  }
  return total;
}

struct Pair {
  F32 a, b;
};
// Two sums at once.
template <class Term>
inline Pair group_sums(int n, Term term) {
  Pair total{f_zero(), f_zero()};
  for (int first = 0; first < n; first += kBlockChannels) {
    const int last = std::min(first + kBlockChannels, n);
    Pair part{f_zero(), f_zero()};
    for (int k = first; k < last; ++k) {
      const Pair t = term(k);
      part = {f_add(part.a, t.a), f_add(part.b, t.b)};
    }
    total = {f_add(total.a, part.a), f_add(total.b, part.b)};
  }
  return total;
}

inline F32 to_f16(F32 v) {
  uint16_t halves[kLanes];
  f_store_f16(halves, v);
  return f_load_f16(halves);
}
inline F32 keep_f32(F32 v) { return v; }

inline F32 reciprocal(F32 scale) {
  return f_select_lt(f_zero(), f_abs(scale), f_div(f_set1(1.0f), scale), f_zero());
}

// Clamped first: the bounds are whole, and huge values then never meet the integer conversion.
inline F32 round_clamp(F32 v, float lo, float hi) {
  return f_from_i(i_from_f(f_min(f_max(v, f_set1(lo)), f_set1(hi))));
}

inline F32 sum_of_squares(const Group& g) {
  return group_sum(g.n, [&](int k) { return g.weigh(f_mul(g.at(k), g.at(k)), k); });
}

// Squared error of decoded(k).
template <class Decoded>
inline F32 squared_error(const Group& g, Decoded decoded) {
  return group_sum(g.n, [&](int k) {
    const F32 residual = f_sub(g.at(k), decoded(k));
    return g.weigh(f_mul(residual, residual), k);
  });
}

// Least-squares scale of codes[n][16] for value(k).
template <class Value, class Code>
inline F32 least_squares(const Group& g, Value value, Code code) {
  const Pair sums = group_sums(g.n, [&](int k) {
    const F32 c = code(k), weighted = g.weigh(c, k);
    return Pair{f_mul(weighted, value(k)), f_mul(weighted, c)};
  });
  return f_select_lt(f_zero(), sums.b, f_div(sums.a, sums.b), f_zero());
}

// The value of largest magnitude (the first of equals) and its magnitude.
inline Pair extreme_of(const Group& g) {
  F32 magnitude = f_zero(), extreme = f_zero();
  for (int k = 0; k < g.n; ++k) {
    const F32 v = g.at(k), a = f_abs(v);
    extreme = f_select_lt(magnitude, a, v, extreme);
    magnitude = f_max(a, magnitude);
  }
  return {extreme, magnitude};
}

// Whether some lane's scale is zero though its values are not small: no scale that is stored
// serves.
inline bool unreached(F32 scale, F32 magnitude) {
  return f_max_lane(f_select_lt(f_zero(), f_abs(scale), f_zero(), magnitude)) > 1.0f;
}

// A best trial so far.
struct Best {
  F32 error, scale;

  void consider(F32 trial_error, F32 trial) {
    scale = f_select_lt(trial_error, error, trial, scale);
    error = f_select_lt(trial_error, error, trial_error, error);
  }
};

struct Levels {
  const float* at;
  int count;
};

// Scales of either sign, so that x is near scale * integer in lo..hi. `levels`: where a trial puts
// the value of largest magnitude. `lost` is set where float16 has no scale for them.
template <class Rounding>
inline F32 fit_symmetric(const Group& g, float* codes, float lo, float hi, Levels levels,
                         Rounding rounding, bool& lost) {
  const Pair extreme = extreme_of(g);
  const F32 inverse =
      f_select_lt(f_set1(kTiny), extreme.b, f_div(f_set1(1.0f), extreme.a), f_zero());
  Best best{sum_of_squares(g), f_zero()};
  const auto trial = [&](F32 factor) {
    return rounding(least_squares(
        g, [&](int k) { return g.at(k); },
        [&](int k) {
          const F32 c = round_clamp(f_mul(g.at(k), factor), lo, hi);
          f_store(codes + k * kLanes, c);
          return c;
        }));
  };
  for (int i = 0; i < levels.count; ++i) {
    const F32 scale = trial(f_mul(inverse, f_set1(levels.at[i])));
    best.consider(squared_error(g, [&](int k) { return f_mul(f_load(codes + k * kLanes), scale); }),
                  scale);
  }
  const F32 refined = trial(reciprocal(best.scale)), factor = reciprocal(refined);
  best.consider(
      squared_error(
          g, [&](int k) { return f_mul(round_clamp(f_mul(g.at(k), factor), lo, hi), refined); }),
      refined);
  lost = lost || unreached(best.scale, extreme.b);
  return best.scale;
}

// Smallest and largest value, widened to reach zero where asked.
inline Pair range_of(const Group& g, bool low_to_zero, bool high_to_zero) {
  F32 low = low_to_zero ? f_min(g.at(0), f_zero()) : g.at(0);
  F32 high = high_to_zero ? f_max(g.at(0), f_zero()) : g.at(0);
  for (int k = 1; k < g.n; ++k) {
    low = f_min(g.at(k), low);
    high = f_max(g.at(k), high);
  }
  return {low, high};
}

// (scale, zero) so that x is near scale * (code - zero), code and zero 0..hi. `levels`: how many
// steps a trial spreads the range over (which always includes zero).
inline Pair fit_zero_point(const Group& g, float* codes, float hi, Levels levels, bool& lost) {
  const Pair range = range_of(g, true, true);
  const F32 low = range.a, span = f_sub(range.b, range.a);
  const F32 inverse = f_select_lt(f_set1(kTiny), span, f_div(f_set1(1.0f), span), f_zero());
  F32 best = f_zero(), best_zero = f_zero(), best_error = sum_of_squares(g);
  for (int i = 0; i < levels.count; ++i) {
    const F32 zero = round_clamp(f_mul(low, f_mul(inverse, f_set1(-levels.at[i]))), 0.0f, hi);
    const F32 factor = f_mul(inverse, f_set1(levels.at[i]));
    const F32 scale = to_f16(least_squares(
        g, [&](int k) { return g.at(k); },
        [&](int k) {
          // The spread is at most one step wider than the codes, so no clamp is needed to round.
          const F32 steps = f_from_i(i_from_f(f_mul(g.at(k), factor)));
          const F32 c = f_sub(f_min(f_max(f_add(steps, zero), f_zero()), f_set1(hi)), zero);
          f_store(codes + k * kLanes, c);
          return c;
        }));
    const F32 error =
        squared_error(g, [&](int k) { return f_mul(f_load(codes + k * kLanes), scale); });
    best = f_select_lt(error, best_error, scale, best);
    best_zero = f_select_lt(error, best_error, zero, best_zero);
    best_error = f_select_lt(error, best_error, error, best_error);
  }
  lost = lost || unreached(best, span);
  return {best, best_zero};
}

// A search over (scale, minimum) pairs, one level at a time; see fit_affine.
template <bool kNonpositive, class Rounding>
struct AffineSearch {
  const Group& g;
  float* codes;
  float hi;
  Rounding rounding;
  F32 low, inverse, total, mean;
  F32 best, best_low, best_error;

  F32 bound(F32 minimum) const {
    return rounding(kNonpositive ? f_min(f_zero(), minimum) : minimum);
  }
  F32 code(int k) const { return f_load(codes + k * kLanes); }

  void start() {
    const Pair range = range_of(g, kNonpositive, false);
    low = range.a;
    const F32 span = f_sub(range.b, low);
    inverse = f_select_lt(f_set1(kTiny), span, f_div(f_set1(1.0f), span), f_zero());
    total = group_sum(g.n, [&](int k) { return g.weigh(f_set1(1.0f), k); });
    mean = f_mul(group_sum(g.n, [&](int k) { return g.weigh(f_sub(g.at(k), low), k); }),
                 reciprocal(total));
    best = f_zero();
    best_low = f_select_lt(f_zero(), total, bound(f_add(mean, low)), f_zero());
    best_error = squared_error(g, [&](int) { return best_low; });
  }

  void consider(F32 error, F32 scale, F32 minimum) {
    best = f_select_lt(error, best_error, scale, best);
    best_low = f_select_lt(error, best_error, minimum, best_low);
    best_error = f_select_lt(error, best_error, error, best_error);
  }

  void level(float steps) {
    const F32 factor = f_mul(inverse, f_set1(steps));
    const F32 centre =
        f_mul(group_sum(g.n,
                        [&](int k) {
                          const F32 c = round_clamp(f_mul(f_sub(g.at(k), low), factor), 0.0f, hi);
                          f_store(codes + k * kLanes, c);
                          return g.weigh(c, k);
                        }),
              reciprocal(total));
    const F32 fitted = least_squares(
        g, [&](int k) { return f_sub(f_sub(g.at(k), low), mean); },
        [&](int k) { return f_sub(code(k), centre); });
    const F32 scale = rounding(f_max(f_zero(), fitted));
    const F32 minimum = bound(f_sub(f_add(low, mean), f_mul(scale, centre)));
    const F32 error =
        squared_error(g, [&](int k) { return f_add(f_mul(code(k), scale), minimum); });
    if constexpr (kNonpositive) {
      // A bound that bites makes the joint fit suboptimal: refit the scale through zero.
      const F32 line =
          least_squares(g, [&](int k) { return g.at(k); }, [&](int k) { return code(k); });
      const F32 through = rounding(f_max(f_zero(), line));
      const F32 through_error = squared_error(g, [&](int k) { return f_mul(code(k), through); });
      const F32 least = f_select_lt(through_error, error, through_error, error);
      consider(least, f_select_lt(through_error, error, through, scale),
               f_select_lt(through_error, error, f_zero(), minimum));
    } else {
      consider(error, scale, minimum);
    }
  }
};

// (scale, minimum) so that x is near scale * code + minimum, code 0..hi. kNonpositive: the minimum
// may not exceed zero (formats that store its negative unsigned).
template <bool kNonpositive, class Rounding>
inline Pair fit_affine(const Group& g, float* codes, float hi, Levels levels, Rounding rounding,
                       bool& lost) {
  AffineSearch<kNonpositive, Rounding> search{g, codes, hi, rounding, {}, {}, {}, {}, {}, {}, {}};
  search.start();
  for (int i = 0; i < levels.count; ++i) search.level(levels.at[i]);
  // Sixteen times zero is zero, of anything not finite NaN.
  const F32 finite = f_add(f_mul(search.best_error, f_zero()), f_mul(search.best_low, f_zero()));
  lost = lost || i_max_lane(i_bits(f_abs(finite))) != 0;
  return {search.best, search.best_low};
}

// Second level: float16 d so that values[n][16] are near d * integer in lo..hi.
inline F32 fit_shared_scale(const Group& values, const float* weight, float lo, float hi,
                            Levels divisors, bool& lost) {
  const auto weighted = [&](F32 v, int s) { return f_mul(v, f_load(weight + s * kLanes)); };
  const Pair extreme = extreme_of(values);
  Best best{
      group_sum(values.n, [&](int s) { return weighted(f_mul(values.at(s), values.at(s)), s); }),
      f_zero()};
  for (int i = 0; i < divisors.count; ++i) {
    const F32 d = to_f16(f_div(extreme.a, f_set1(divisors.at[i]))), factor = reciprocal(d);
    const F32 error = group_sum(values.n, [&](int s) {
      const F32 code = round_clamp(f_mul(values.at(s), factor), lo, hi);
      const F32 residual = f_sub(values.at(s), f_mul(code, d));
      return weighted(f_mul(residual, residual), s);
    });
    best.consider(error, d);
  }
  lost = lost || unreached(best.scale, extreme.b);
  return best.scale;
}

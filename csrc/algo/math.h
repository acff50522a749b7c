// Elementary functions on sixteen lanes, the same bits on every ISA. Included in the anonymous
// namespace of each ISA, after its simd/ header.
#pragma once

// e^x, error below one unit in the last place; 0 at -inf, inf above 88.73, NaN for NaN.
//
// x = n ln 2 + r with |r| <= ln(2) / 2 (Cody and Waite: n * kLn2High is exact, so is the first
// difference), e^r = 1 + r + r^2 q(r) with q interpolated at the Chebyshev nodes of that interval
// (relative error of the sum 2^-27), and 2^n is applied with one rounding, so that subnormal
// results are right too.
inline F32 f_exp(F32 x) {
  constexpr float kRoundToWhole = 0x1.8p23f;
  constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;
  // Beyond these the result is 0 or inf anyway. f_max and f_min keep a NaN in the second operand.
  x = f_min(f_set1(90.0f), f_max(f_set1(-105.0f), x));
  const F32 whole = f_set1(kRoundToWhole);
  const F32 n = f_sub(f_fma(x, f_set1(0x1.715476p+0f), whole), whole);
  F32 r = f_fma(n, f_set1(-kLn2High), x);
  r = f_fma(n, f_set1(-kLn2Low), r);
  F32 p = f_fma(f_set1(0x1.6c82fp-10f), r, f_set1(0x1.122544p-7f));
  p = f_fma(p, r, f_set1(0x1.5555bep-5f));
  p = f_fma(p, r, f_set1(0x1.5554b2p-3f));
  p = f_fma(p, r, f_set1(0.5f));
  p = f_fma(p, r, f_set1(1.0f));
  p = f_fma(p, r, f_set1(1.0f));
  return f_ldexp(p, n);
}

// 1 / (1 + e^-x). e^-x may overflow: 1 / inf is the right limit.
inline F32 f_sigmoid(F32 x) {
  const F32 one = f_set1(1.0f);
  return f_div(one, f_add(one, f_exp(f_sub(f_zero(), x))));
}

// tanh(x), error below 2^-22 of it where |x| < 0.7, 2^-22 above.
//
// Near zero x + x^3 q(x^2), q interpolated at the Chebyshev nodes of 0..0.49 (relative error
// 2^-26); beyond, 1 - 2 / (1 + e^2x), whose exponential may overflow to the right limit.
inline F32 f_tanh(F32 x) {
  const F32 one = f_set1(1.0f), z = f_mul(x, x);
  F32 q = f_fma(f_set1(0x1.0ea4dep-9f), z, f_set1(-0x1.0a08aep-7f));
  q = f_fma(q, z, f_set1(0x1.636560p-6f));
  q = f_fma(q, z, f_set1(-0x1.b9f258p-5f));
  q = f_fma(q, z, f_set1(0x1.1110a4p-3f));
  q = f_fma(q, z, f_set1(-0x1.555554p-2f));
  const F32 near = f_fma(f_mul(x, z), q, x);
  const F32 far = f_sub(one, f_div(f_set1(2.0f), f_add(one, f_exp(f_add(x, x)))));
  return f_select_lt(f_abs(x), f_set1(0.7f), near, far);
}

// x / (1 + e^-x), finite for every finite x (arXiv:1702.03118).
inline F32 f_silu(F32 x) { return f_div(x, f_add(f_set1(1.0f), f_exp(f_sub(f_zero(), x)))); }

// x * Phi(x), Phi the normal distribution's (arXiv:1606.08415); error below 2^-22 of it above zero
// and 2^-19 below.
//
// Phi(-a) = e^(-a^2 / 2) t q(t) with t = 1 / (1 + 0.35 a); q is a minimax fit of its relative error
// over 0 <= a <= 14, 2^-24 at most.
inline F32 f_gelu(F32 x) {
  const F32 one = f_set1(1.0f), a = f_abs(x);
  const F32 t = f_div(one, f_fma(f_set1(0.35f), a, one));
  F32 q = f_fma(f_set1(-0x1.dd87a6p-6f), t, f_set1(0x1.26db18p-3f));
  q = f_fma(q, t, f_set1(-0x1.05da6cp-2f));
  q = f_fma(q, t, f_set1(0x1.45fe26p-3f));
  q = f_fma(q, t, f_set1(-0x1.7aa75ap-6f));
  q = f_fma(q, t, f_set1(0x1.b029c0p-4f));
  q = f_fma(q, t, f_set1(0x1.ead5bap-4f));
  q = f_fma(q, t, f_set1(0x1.1e6fe8p-3f));
  q = f_fma(q, t, f_set1(0x1.1df1d4p-3f));
  const F32 tail = f_mul(f_mul(q, t), f_exp(f_mul(f_mul(f_set1(-0.5f), a), a)));
  const F32 below = f_mul(x, tail);
  return f_select_lt(x, f_zero(), below, f_sub(x, below));
}

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), written as x / (1 + e^(-2 ...)).
inline F32 f_gelu_tanh(F32 x) {
  const F32 slope = f_fma(f_set1(-0.07135481627f), f_mul(x, x), f_set1(-1.5957691216f));
  return f_div(x, f_add(f_set1(1.0f), f_exp(f_mul(x, slope))));
}

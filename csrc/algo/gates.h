// What an expert makes of its gate and up channels. Included in the anonymous namespace of each
// ISA.
#pragma once

struct SiluGate {
  static F32 apply(F32 gate, F32 up) { return f_mul(f_silu(gate), up); }
};

struct GeluGate {
  static F32 apply(F32 gate, F32 up) { return f_mul(f_gelu(gate), up); }
};

struct GeluTanhGate {
  static F32 apply(F32 gate, F32 up) { return f_mul(f_gelu_tanh(gate), up); }
};

// f_max and f_min keep a NaN in the second operand.
struct ReluGate {
  static F32 apply(F32 gate, F32 up) { return f_mul(f_max(f_zero(), gate), up); }
};

// Gate clamped from above, up from both sides; gate * sigmoid(1.702 * gate) * (up + 1).
struct SwigluOaiGate {
  static F32 apply(F32 gate, F32 up) {
    const F32 one = f_set1(1.0f), limit = f_set1(7.0f);
    gate = f_min(limit, gate);
    up = f_max(f_set1(-7.0f), f_min(limit, up));
    const F32 slope = f_div(gate, f_add(one, f_exp(f_mul(f_set1(-1.702f), gate))));
    return f_mul(slope, f_add(up, one));
  }
};

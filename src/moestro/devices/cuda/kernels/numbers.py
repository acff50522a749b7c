"""Elementary functions, gates and the rounding of activations, as the CPU's kernels have them.

The steps and constants are those of ``csrc/algo/math.h``, ``gates.h`` and ``activation_kernels.h``,
so that integer formats give the same bits here. They need every product and sum rounded once where
it stands: launches turn contraction off, and where a product and a sum are one step it says fma.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(float.fromhex("0x1.715476p+0"))
_LN2_HIGH = tl.constexpr(float.fromhex("0x1.62e4p-1"))
_LN2_LOW = tl.constexpr(float.fromhex("0x1.7f7d1cp-20"))
#: adding and taking it away rounds to whole numbers, half to even
_TO_WHOLE = tl.constexpr(12582912.0)
_E6 = tl.constexpr(float.fromhex("0x1.6c82fp-10"))
_E5 = tl.constexpr(float.fromhex("0x1.122544p-7"))
_E4 = tl.constexpr(float.fromhex("0x1.5555bep-5"))
_E3 = tl.constexpr(float.fromhex("0x1.5554b2p-3"))
_T5 = tl.constexpr(float.fromhex("0x1.0ea4dep-9"))
_T4 = tl.constexpr(float.fromhex("-0x1.0a08aep-7"))
_T3 = tl.constexpr(float.fromhex("0x1.636560p-6"))
_T2 = tl.constexpr(float.fromhex("-0x1.b9f258p-5"))
_T1 = tl.constexpr(float.fromhex("0x1.1110a4p-3"))
_T0 = tl.constexpr(float.fromhex("-0x1.555554p-2"))
_G8 = tl.constexpr(float.fromhex("-0x1.dd87a6p-6"))
_G7 = tl.constexpr(float.fromhex("0x1.26db18p-3"))
_G6 = tl.constexpr(float.fromhex("-0x1.05da6cp-2"))
_G5 = tl.constexpr(float.fromhex("0x1.45fe26p-3"))
_G4 = tl.constexpr(float.fromhex("-0x1.7aa75ap-6"))
_G3 = tl.constexpr(float.fromhex("0x1.b029c0p-4"))
_G2 = tl.constexpr(float.fromhex("0x1.ead5bap-4"))
_G1 = tl.constexpr(float.fromhex("0x1.1e6fe8p-3"))
_G0 = tl.constexpr(float.fromhex("0x1.1df1d4p-3"))
#: 127 / amax must not overflow; below this a block counts as zero
_SMALLEST_AMAX = tl.constexpr(1e-30)
_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def at_most(x, limit):
    """min(x, limit), NaN for NaN."""
    return tl.where(x > limit, limit, x)


@triton.jit
def at_least(x, limit):
    """max(x, limit), NaN for NaN."""
    return tl.where(x < limit, limit, x)


@triton.jit
def power_of_two(n):
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exp(x):
    """e^x; see f_exp."""
    x = at_most(at_least(x, -105.0), 90.0)
    n = tl.fma(x, tl.full(x.shape, _LOG2_E, tl.float32), tl.full(x.shape, _TO_WHOLE, tl.float32))
    n = n - _TO_WHOLE
    r = tl.fma(n, tl.full(x.shape, 0.0 - _LN2_HIGH, tl.float32), x)
    r = tl.fma(n, tl.full(x.shape, 0.0 - _LN2_LOW, tl.float32), r)
    p = tl.fma(tl.full(x.shape, _E6, tl.float32), r, tl.full(x.shape, _E5, tl.float32))
    p = tl.fma(p, r, tl.full(x.shape, _E4, tl.float32))
    p = tl.fma(p, r, tl.full(x.shape, _E3, tl.float32))
    p = tl.fma(p, r, tl.full(x.shape, 0.5, tl.float32))
    p = tl.fma(p, r, tl.full(x.shape, 1.0, tl.float32))
    p = tl.fma(p, r, tl.full(x.shape, 1.0, tl.float32))
    # In two factors, of which only the second can round: subnormal results are rounded once.
    whole = n.to(tl.int32)
    half = whole >> 1
    return p * power_of_two(half) * power_of_two(whole - half)


@triton.jit
def tanh(x):
    """See f_tanh: a series near zero, beyond it by the exponential."""
    z = x * x
    q = tl.fma(tl.full(x.shape, _T5, tl.float32), z, tl.full(x.shape, _T4, tl.float32))
    q = tl.fma(q, z, tl.full(x.shape, _T3, tl.float32))
    q = tl.fma(q, z, tl.full(x.shape, _T2, tl.float32))
    q = tl.fma(q, z, tl.full(x.shape, _T1, tl.float32))
    q = tl.fma(q, z, tl.full(x.shape, _T0, tl.float32))
    two = tl.full(x.shape, 2.0, tl.float32)
    far = 1.0 - tl.div_rn(two, 1.0 + exp(x + x))
    return tl.where(tl.abs(x) < 0.7, tl.fma(x * z, q, x), far)


@triton.jit
def gelu(x):
    """x times the normal distribution's; see f_gelu."""
    one = tl.full(x.shape, 1.0, tl.float32)
    a = tl.abs(x)
    t = tl.div_rn(one, tl.fma(tl.full(x.shape, 0.35, tl.float32), a, one))
    q = tl.fma(tl.full(x.shape, _G8, tl.float32), t, tl.full(x.shape, _G7, tl.float32))
    q = tl.fma(q, t, tl.full(x.shape, _G6, tl.float32))
    q = tl.fma(q, t, tl.full(x.shape, _G5, tl.float32))
    q = tl.fma(q, t, tl.full(x.shape, _G4, tl.float32))
    q = tl.fma(q, t, tl.full(x.shape, _G3, tl.float32))
    q = tl.fma(q, t, tl.full(x.shape, _G2, tl.float32))
    q = tl.fma(q, t, tl.full(x.shape, _G1, tl.float32))
    q = tl.fma(q, t, tl.full(x.shape, _G0, tl.float32))
    tail = q * t * exp(-0.5 * a * a)
    below = x * tail
    return tl.where(x < 0.0, below, x - below)


@triton.jit
def gate_up(gate, up, ACTIVATION: tl.constexpr):
    """What an expert makes of gate and up (``ops.operands.ACTIVATIONS``)."""
    if ACTIVATION == "silu":
        return tl.div_rn(gate, 1.0 + exp(0.0 - gate)) * up
    elif ACTIVATION == "gelu":
        return gelu(gate) * up
    elif ACTIVATION == "gelu_tanh":
        slope = tl.full(gate.shape, -0.07135481627, tl.float32)
        slope = tl.fma(slope, gate * gate, tl.full(gate.shape, -1.5957691216, tl.float32))
        return tl.div_rn(gate, 1.0 + exp(gate * slope)) * up
    elif ACTIVATION == "relu":
        return at_least(gate, 0.0) * up
    else:
        tl.static_assert(ACTIVATION == "swiglu_oai")
        gate, up = at_most(gate, 7.0), at_least(at_most(up, 7.0), -7.0)
        return tl.div_rn(gate, 1.0 + exp(-1.702 * gate)) * (up + 1.0)


@triton.jit
def round_block(x):
    """Blocks float32 [m, 32] -> codes int32 [m, 32], scales float32 [m], and the sums int32 [m] of
    both halves' codes. The scale is amax / 127; NaN, with codes 0, where a NaN or infinity is.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(bits, 1)
    amax = largest.to(tl.float32, bitcast=True)
    broken = largest >= _INFINITY_BITS
    usable = (amax >= _SMALLEST_AMAX) & (largest < _INFINITY_BITS)
    divisor = tl.where(usable, amax, 1.0)
    scale = tl.where(usable, tl.div_rn(divisor, 127.0 + tl.zeros_like(divisor)), 0.0)
    scale = tl.where(broken, float("nan"), scale)
    inverse = tl.where(usable, tl.div_rn(127.0 + tl.zeros_like(divisor), divisor), 0.0)
    scaled = tl.where(broken[:, None], 0.0, x) * inverse[:, None]
    codes = ((scaled + _TO_WHOLE) - _TO_WHOLE).to(tl.int32)
    low = (tl.arange(0, 32) < 16)[None, :]
    return (
        codes,
        scale,
        tl.sum(tl.where(low, codes, 0), 1),
        tl.sum(tl.where(low, 0, codes), 1),
    )


@triton.jit
def store_block(x, codes, scales, sums, row, valid, block, blocks):
    """Round blocks [m, 32] of rows [m] and store them as block ``block`` of ``blocks``."""
    q, scale, low, high = round_block(x)
    at = row.to(tl.int64) * blocks + block
    k = tl.arange(0, 32)
    tl.store(codes + at[:, None] * 32 + k[None, :], q.to(tl.int8), mask=valid[:, None])
    tl.store(scales + at, scale, mask=valid)
    tl.store(sums + at * 2, low, mask=valid)
    tl.store(sums + at * 2 + 1, high, mask=valid)


@triton.jit
def round_rows(x, live, codes, scales, sums, cols, stride, blocks, PER_ROW: tl.constexpr):
    """Activations x float32 [rows, stride], of which ``cols`` count, as signed bytes per 32.

    Grid (rows, blocks). PER_ROW rows here are one live row. codes int8 [rows, 32 * blocks], scales
    float32 [rows, blocks], sums int32 [rows, blocks, 2].
    """
    row, block = tl.program_id(0), tl.program_id(1)
    if row < tl.load(live) * PER_ROW:
        k = block * 32 + tl.arange(0, 32)
        values = tl.load(x + row.to(tl.int64) * stride + k, mask=k < cols, other=0.0)
        rows = row + tl.zeros([1], tl.int32)
        store_block(values[None, :], codes, scales, sums, rows, rows >= 0, block, blocks)

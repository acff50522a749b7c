"""Decoders in Triton: codes, steps and minima of one block of 32 input channels.

They mirror ``csrc/algo/decode.h`` over the tiles of ``csrc/formats/layouts.h``. ``tile`` and
``block`` are byte pointers [n], one per output channel, ``lane`` [n] the channel's place among the
sixteen of its tile, ``b`` the block's place in the tile. Codes come as two halves of 16 input
channels, int32 [4, n] each: word j holds channels 4j..4j+3, one unsigned byte each.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOW = tl.constexpr(0x0F0F0F0F)
_ONES = tl.constexpr(0x01010101)
_PAIRS = tl.constexpr(0x03030303)
#: what is missing to the exponent of an e4m3 number whose bits are moved into a float32
_TWO_TO_120 = tl.constexpr(2.0**120)
#: values 0..7 and 8..15 of the sixteen of lut4nl plus 128, a byte each
_NL_LOW = tl.constexpr(0x766A5D4F3F2D1801)
_NL_HIGH = tl.constexpr(0xF1D9C5B5A6998D81 - (1 << 64))


@triton.jit
def words_at(block, lane, first: tl.constexpr):
    """Four rows of words from byte ``first`` on, int32 [4, n]."""
    at = (block + first + lane * 4).to(tl.pointer_type(tl.int32))
    return tl.load(at[None, :] + tl.arange(0, 4)[:, None] * 16)


@triton.jit
def word_at(block, lane, first: tl.constexpr):
    """One row of words from byte ``first`` on, int32 [1, n]."""
    return tl.load((block + first + lane * 4).to(tl.pointer_type(tl.int32)))[None, :]


@triton.jit
def half_at(tile, lane, first: tl.constexpr):
    """float16 [n] from byte ``first`` on, as float32."""
    return tl.load((tile + first + lane * 2).to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def byte_at(tile, lane, first):
    """Unsigned bytes [n] from ``first`` on, as int32."""
    return tl.load(tile + first + lane).to(tl.int32)


@triton.jit
def signed_at(tile, lane, first):
    """Signed bytes [n] from ``first`` on, as float32."""
    return ((byte_at(tile, lane, first) << 24) >> 24).to(tl.float32)


@triton.jit
def e4m3(byte):
    """int32 of an e4m3 byte -> float32; 0x7f gives 480, for those who know no NaN."""
    magnitude = ((byte & 127) << 20).to(tl.float32, bitcast=True) * _TWO_TO_120
    return tl.where(byte > 127, -magnitude, magnitude)


# ---- codes


@triton.jit
def byte_codes(block, lane):
    return words_at(block, lane, 0), words_at(block, lane, 256)


@triton.jit
def nibble_codes(block, lane):
    both = words_at(block, lane, 0)
    return both & _LOW, (both >> 4) & _LOW


@triton.jit
def pair_codes(block, lane, first: tl.constexpr = 0):
    shift = tl.arange(0, 4)[:, None] * 2
    low, high = word_at(block, lane, first), word_at(block, lane, first + 64)
    return (low >> shift) & _PAIRS, (high >> shift) & _PAIRS


@triton.jit
def bit_plane(block, lane, first: tl.constexpr):
    bits, shift = word_at(block, lane, first), tl.arange(0, 4)[:, None]
    return (bits >> shift) & _ONES, (bits >> (shift + 4)) & _ONES


@triton.jit
def five_bit_codes(block, lane):
    low, high = nibble_codes(block, lane)
    low_bit, high_bit = bit_plane(block, lane, 256)
    return low | (low_bit << 4), high | (high_bit << 4)


@triton.jit
def six_bit_codes(block, lane):
    low, high = nibble_codes(block, lane)
    low_pair, high_pair = pair_codes(block, lane, 256)
    return low | (low_pair << 4), high | (high_pair << 4)


@triton.jit
def three_bit_codes(block, lane):
    low, high = pair_codes(block, lane)
    low_bit, high_bit = bit_plane(block, lane, 128)
    return low | (low_bit << 2), high | (high_bit << 2)


@triton.jit
def two_bit_codes(block, lane):
    return pair_codes(block, lane)


@triton.jit
def e2m1_words(word):
    """Twice the value of four e2m1 nibbles plus 12, byte by byte: no carry leaves a byte."""
    m, e_low, e_high = word & _ONES, (word >> 1) & _ONES, (word >> 2) & _ONES
    magnitude = m + ((e_low | e_high) << 1)
    doubled = magnitude & (e_high * 255)
    tripled = magnitude & ((e_high & e_low) * 255)
    # exponents 0 and 1 leave it, 2 doubles it, 3 makes four of it
    magnitude = magnitude + doubled + tripled * 2
    negative = ((word >> 3) & _ONES) * 255
    return magnitude + 0x0C0C0C0C - ((magnitude & negative) << 1)


@triton.jit
def e2m1_codes(block, lane):
    low, high = nibble_codes(block, lane)
    return e2m1_words(low), e2m1_words(high)


@triton.jit
def nl_byte(word, shift: tl.constexpr):
    index = (word >> shift) & 15
    table = tl.where(index < 8, _NL_LOW, _NL_HIGH)
    return ((table >> ((index & 7) * 8).to(tl.int64)) & 255).to(tl.int32) << shift


@triton.jit
def nl_words(word):
    return nl_byte(word, 0) | nl_byte(word, 8) | nl_byte(word, 16) | nl_byte(word, 24)


@triton.jit
def nl_codes(block, lane):
    low, high = nibble_codes(block, lane)
    return nl_words(low), nl_words(high)


# ---- steps: the scales of both halves (equal where a block has one), and minima likewise


@triton.jit
def no_minima(tile, lane, b):
    zero = tl.zeros_like(lane).to(tl.float32)
    return zero, zero


@triton.jit
def half_steps(tile, lane, b):
    scale = half_at(tile, lane, 0)
    return scale, scale


@triton.jit
def zero_point_minima(tile, lane, b):
    low = half_at(tile, lane, 0) * (0.0 - byte_at(tile, lane, 32).to(tl.float32))
    return low, low


@triton.jit
def half_minima(tile, lane, b):
    low = half_at(tile, lane, 32)
    return low, low


@triton.jit
def e8m0_steps(tile, lane, b):
    # 2^(e - 128), in two factors: e below 2 gives a subnormal number
    e = byte_at(tile, lane, 0)
    half = e >> 1
    first = ((half + 63) << 23).to(tl.float32, bitcast=True)
    second = ((e - half + 63) << 23).to(tl.float32, bitcast=True)
    scale = first * second
    return scale, scale


@triton.jit
def e4m3_steps(tile, lane, b):
    low = e4m3(byte_at(tile, lane, b * 32)) * 0.5
    return low, e4m3(byte_at(tile, lane, b * 32 + 16)) * 0.5


@triton.jit
def scaled_e4m3_steps(tile, lane, b):
    d = tl.load((tile + lane * 4).to(tl.pointer_type(tl.float32)))
    low = e4m3(byte_at(tile, lane, 64 + b * 32)) * d
    return low, e4m3(byte_at(tile, lane, 80 + b * 32)) * d


@triton.jit
def nibble_pair_steps(tile, lane, b):
    d = half_at(tile, lane, 0)
    first, second = byte_at(tile, lane, 64 + b * 32), byte_at(tile, lane, 80 + b * 32)
    return d * (first & 15).to(tl.float32), d * (second & 15).to(tl.float32)


@triton.jit
def nibble_pair_minima(tile, lane, b):
    d = 0.0 - half_at(tile, lane, 32)
    first, second = byte_at(tile, lane, 64 + b * 32), byte_at(tile, lane, 80 + b * 32)
    return d * (first >> 4).to(tl.float32), d * (second >> 4).to(tl.float32)


@triton.jit
def six_bit_steps(tile, lane, b):
    d = half_at(tile, lane, 0)
    low = byte_at(tile, lane, 32 + b * 16)
    high = byte_at(tile, lane, 160 + b // 2 * 16) >> (b % 2 * 4)
    first = (low & 15) + ((high & 3) << 4) - 32
    second = (low >> 4) + (((high >> 2) & 3) << 4) - 32
    return d * first.to(tl.float32), d * second.to(tl.float32)


@triton.jit
def byte_steps(tile, lane, b):
    scale = half_at(tile, lane, 0) * byte_at(tile, lane, 64 + b * 16).to(tl.float32)
    return scale, scale


@triton.jit
def byte_minima(tile, lane, b):
    low = (0.0 - half_at(tile, lane, 32)) * byte_at(tile, lane, 192 + b * 16).to(tl.float32)
    return low, low


@triton.jit
def signed_steps(tile, lane, b):
    scale = half_at(tile, lane, 0) * signed_at(tile, lane, 32 + b * 16)
    return scale, scale


@triton.jit
def signed_pair_steps(tile, lane, b):
    d = half_at(tile, lane, 0)
    return d * signed_at(tile, lane, 32 + b * 32), d * signed_at(tile, lane, 48 + b * 32)


# ---- float formats: elements [32, n] of a block, and the scale of a tile


@triton.jit
def f32_elements(block, lane, k):
    at = block.to(tl.pointer_type(tl.float32))[None, :]
    return tl.load(at + (k[:, None] * 16 + lane[None, :]))


@triton.jit
def f16_elements(block, lane, k):
    at = block.to(tl.pointer_type(tl.float16))[None, :]
    return tl.load(at + (k[:, None] * 16 + lane[None, :])).to(tl.float32)


@triton.jit
def bf16_elements(block, lane, k):
    at = block.to(tl.pointer_type(tl.bfloat16))[None, :]
    return tl.load(at + ((k // 2 * 32 + k % 2)[:, None] + (lane * 2)[None, :]))


@triton.jit
def e4m3_elements(block, lane, k):
    byte = tl.load(block[None, :] + (k[:, None] * 16 + lane[None, :])).to(tl.int32)
    value = tl.where((byte & 127) == 127, float("nan"), e4m3(byte))
    return value.to(tl.bfloat16)


@triton.jit
def f32_scale(tile, lane):
    return tl.load((tile + lane * 4).to(tl.pointer_type(tl.float32)))

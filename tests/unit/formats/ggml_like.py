"""Yardsticks for quantization error: plain absmax rounding, and searches after ggml's methods.

Written from the published algorithms (absmax and min/max rounding; weighted least-squares search
over trial scales, then a second level of integer scales), for comparison of errors only.
"""

from __future__ import annotations

import numpy as np
import torch


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float64)


def inverse(x: np.ndarray) -> np.ndarray:
    return np.divide(1.0, x, out=np.zeros_like(x), where=x != 0)


def absmax(x: np.ndarray, group: int, hi: int) -> np.ndarray:
    """Symmetric rounding to -hi..hi by the largest magnitude of each group."""
    groups = x.reshape(-1, group).astype(np.float64)
    d = half(np.abs(groups).max(1, keepdims=True) / hi)
    return (np.clip(np.rint(groups * inverse(d)), -hi, hi) * d).reshape(x.shape)


def signed_max(x: np.ndarray, group: int, lo: int) -> np.ndarray:
    """As Q4_0 and Q8_0 without search: the extreme goes to the lower end of the range."""
    groups = x.reshape(-1, group).astype(np.float64)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1)
    d = half(extreme / lo)
    return (np.clip(np.rint(groups * inverse(d)), lo, -lo - 1) * d).reshape(x.shape)


def minmax(x: np.ndarray, group: int, hi: int = 15) -> np.ndarray:
    """As Q4_1 (or Q5_1): hi + 1 levels from the least to the greatest value of each group."""
    groups = x.reshape(-1, group).astype(np.float64)
    low = groups.min(1, keepdims=True)
    d = half((groups.max(1, keepdims=True) - low) / hi)
    low16 = half(low)
    return (np.clip(np.rint((groups - low) * inverse(d)), 0, hi) * d + low16).reshape(x.shape)


def two_level_affine(
    x: np.ndarray,
    weights: np.ndarray,
    *,
    sub: int = 32,
    hi: int = 15,
    limit: int = 63,
    first: float = 14,
    steps: int = 21,
) -> np.ndarray:
    """Q4_K: least-squares search of 21 trial scales per 32, then 6-bit scales and minima per 256.

    weights: of each squared error in the search, same shape as x. With other numbers Q2_K and Q5_K.
    """
    subs, w = x.reshape(-1, sub).astype(np.float64), weights.reshape(-1, sub)
    low = np.minimum(subs.min(1, keepdims=True), 0)
    span = subs.max(1, keepdims=True) - low
    scale, offset = span / hi, low.copy()
    codes = np.clip(np.rint((subs - low) * inverse(scale)), 0, hi)
    best = (w * (scale * codes + offset - subs) ** 2).sum(1, keepdims=True)
    for step in range(steps):
        trial = inverse(span) * (first + 0.1 * step)
        codes = np.clip(np.rint((subs - low) * trial), 0, hi)
        sw, sl, sl2 = (np.sum(w * codes**p, 1, keepdims=True) for p in (0, 1, 2))
        sx, sxl = np.sum(w * subs, 1, keepdims=True), np.sum(w * subs * codes, 1, keepdims=True)
        det = sw * sl2 - sl * sl
        d, m = (sw * sxl - sx * sl) * inverse(det), (sl2 * sx - sl * sxl) * inverse(det)
        d = np.where(m > 0, sxl * inverse(sl2), d)
        m = np.minimum(m, 0)
        error = (w * (d * codes + m - subs) ** 2).sum(1, keepdims=True)
        better = (error < best) & (det > 0)
        scale, offset = np.where(better, d, scale), np.where(better, m, offset)
        best = np.where(better, error, best)
    scale, offset = scale.reshape(-1, 256 // sub, 1), -offset.reshape(-1, 256 // sub, 1)
    top, low_top = scale.max(1, keepdims=True), offset.max(1, keepdims=True)
    d = half(top / limit) * np.clip(np.rint(scale * limit * inverse(top)), 0, limit)
    m = half(low_top / limit) * np.clip(np.rint(offset * limit * inverse(low_top)), 0, limit)
    blocks = subs.reshape(-1, 256 // sub, sub)
    codes = np.clip(np.rint((blocks + m) * inverse(d)), 0, hi)
    return (d * codes - m).reshape(x.shape)


def two_level_symmetric(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Q6_K: search of 19 trial scales per 16, then signed 8-bit scales per 256."""
    subs, w = x.reshape(-1, 16).astype(np.float64), weights.reshape(-1, 16)
    extreme = np.take_along_axis(subs, np.abs(subs).argmax(1)[:, None], 1)
    best, scale = np.full_like(extreme, -1), np.zeros_like(extreme)
    for step in range(-9, 10):
        codes = np.clip(np.rint(subs * -(32 + 0.1 * step) * inverse(extreme)), -32, 31)
        sxl, sl2 = (w * subs * codes).sum(1, keepdims=True), (w * codes**2).sum(1, keepdims=True)
        gain = sxl * sxl * inverse(sl2)
        better = gain > best
        scale, best = np.where(better, sxl * inverse(sl2), scale), np.where(better, gain, best)
    scale = scale.reshape(-1, 16, 1)
    top = np.take_along_axis(scale, np.abs(scale).argmax(1)[:, None], 1)
    d = half(top / -128) * np.clip(np.rint(scale * -128 * inverse(top)), -128, 127)
    blocks = subs.reshape(-1, 16, 16)
    return (np.clip(np.rint(blocks * inverse(d)), -32, 31) * d).reshape(x.shape)


def two_level_three_bits(x: np.ndarray) -> np.ndarray:
    """Q3_K: codes improved one after another, weighted by the squares; signed 6-bit scales."""
    subs = x.reshape(-1, 16).astype(np.float64)
    w = subs**2
    extreme = np.take_along_axis(subs, np.abs(subs).argmax(1)[:, None], 1)
    codes = np.clip(np.rint(subs * -4 * inverse(extreme)), -4, 3)
    sxl, sl2 = (w * subs * codes).sum(1), (w * codes**2).sum(1)
    for i in list(range(16)) * 5:
        rest, rest2 = sxl - w[:, i] * subs[:, i] * codes[:, i], sl2 - w[:, i] * codes[:, i] ** 2
        new = np.clip(np.rint(subs[:, i] * rest2 * inverse(rest)), -4, 3)
        rest, rest2 = rest + w[:, i] * subs[:, i] * new, rest2 + w[:, i] * new**2
        better = (rest > 0) & (rest2 > 0) & (rest**2 * sl2 > sxl**2 * rest2)
        codes[:, i] = np.where(better, new, codes[:, i])
        sxl, sl2 = np.where(better, rest, sxl), np.where(better, rest2, sl2)
    scale = (sxl * inverse(sl2)).reshape(-1, 16, 1)
    top = np.take_along_axis(scale, np.abs(scale).argmax(1)[:, None], 1)
    d = half(top / -32) * np.clip(np.rint(scale * -32 * inverse(top)), -32, 31)
    blocks = subs.reshape(-1, 16, 16)
    return (np.clip(np.rint(blocks * inverse(d)), -4, 3) * d).reshape(x.shape)


def nearest(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    return table[np.abs(x[..., None] - table).argmin(-1)]


def table_search(x: np.ndarray, table: np.ndarray, *, two_level: bool = False) -> np.ndarray:
    """IQ4_NL and (two_level) IQ4_XS: search of 15 trial scales per 32, weighted by the squares."""
    subs = x.reshape(-1, 32).astype(np.float64)
    w = subs**2
    extreme = np.take_along_axis(subs, np.abs(subs).argmax(1)[:, None], 1)
    best, scale = np.full_like(extreme, -1), np.zeros_like(extreme)
    for step in range(-7, 8):
        values = nearest(subs * (step + table[0]) * inverse(extreme), table)
        sxl, sl2 = (w * subs * values).sum(1, keepdims=True), (w * values**2).sum(1, keepdims=True)
        gain = sxl * sxl * inverse(sl2)
        better = gain > best
        scale, best = np.where(better, sxl * inverse(sl2), scale), np.where(better, gain, best)
    if two_level:
        scale = scale.reshape(-1, 8, 1)
        top = np.take_along_axis(scale, np.abs(scale).argmax(1)[:, None], 1)
        scale = half(top / -32) * np.clip(np.rint(scale * -32 * inverse(top)), -32, 31)
        scale = scale.reshape(-1, 1)
    else:
        scale = half(scale)
    return (nearest(subs * inverse(scale), table) * scale).reshape(x.shape)


def shared_exponent(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """MXFP4 as the MX specification converts: the exponent of the largest magnitude decides."""
    groups = x.reshape(-1, 32).astype(np.float64)
    _, top = np.frexp(np.abs(groups).max(1, keepdims=True))
    scale = np.ldexp(1.0, top - 4)  # table holds twice the values, the largest of them 12
    return (nearest(groups / scale, table) * scale).reshape(x.shape)


def two_level_floats(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """NVFP4 as ModelOpt converts: the largest magnitude of the matrix and of each 16 decide."""
    top = np.abs(x).max() / (12 * 448)
    groups = x.reshape(-1, 16).astype(np.float64) / top
    scale = torch.from_numpy(np.abs(groups).max(1, keepdims=True) / 12)
    scale = scale.to(torch.float8_e4m3fn).to(torch.float64).numpy()
    safe = np.where(scale > 0, scale, 1)
    return (nearest(groups / safe, table) * scale * top).reshape(x.shape)

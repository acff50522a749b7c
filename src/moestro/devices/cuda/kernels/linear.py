"""A packed matrix times rows of activations."""

from __future__ import annotations

import triton
import triton.language as tl

from moestro.devices.cuda.kernels.products import channel_tiles, products


@triton.jit
def linear(
    x, codes, scales, sums, data, bias, out, live, rows, cols, stride, blocks, row_nbytes,
    FMT: tl.constexpr, HEADS: tl.constexpr, BIASED: tl.constexpr, ACCUMULATE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out [T, rows] = (out +) products (+ bias). Grid (channels / BN, T / BM).

    With HEADS the matrix is HEADS equal parts of rows, a multiple of BN each, and part h meets the
    activations of row token * HEADS + h.
    """
    first, count = tl.program_id(1) * BM, tl.load(live)
    if first < count:
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        token = first + tl.arange(0, BM)
        valid = token < count
        token = tl.where(valid, token, first)
        row = token * HEADS + tl.program_id(0) * BN // (rows // HEADS)
        tiles = channel_tiles(data, n, rows, row_nbytes)
        value = products(
            tiles, n % 16, row, x, cols, stride, codes, scales, sums, blocks, FMT, DOT, UNROLL
        )
        if BIASED:
            value += tl.load(bias + n, mask=n < rows, other=0.0)[None, :]
        at = out + token.to(tl.int64)[:, None] * rows + n[None, :]
        mask = valid[:, None] & (n < rows)[None, :]
        if ACCUMULATE:
            value = tl.load(at, mask=mask, other=0.0) + value
        tl.store(at, value, mask=mask)

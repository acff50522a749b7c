"""Products of activations and packed tiles, for one row by words and for many by matrix units.

Integer formats: per block of 32 input channels an exact dot in 32 bits, then the float steps of
``csrc/algo/tiles_int.h`` in their order. So a result has the bits of the CPU's, for any number of
rows and however output channels are cut. Float formats: sums in float32, in an order of their own.

``FMT`` is a ``formats.TileFormat``. ``tiles`` is byte pointers [BN], where each output channel's
row of tiles begins, ``lane`` its place in the tile. ``row`` int [BM]: rows of the activations.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot4(words, x, DOT: tl.constexpr):
    """Sum of four products, unsigned bytes of ``words`` with signed bytes of ``x``, as int32."""
    if DOT == "dp4a":
        total = tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, 0;", "=r,r,r", [words, x],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        total = (words & 255) * ((x << 24) >> 24)
        total += ((words >> 8) & 255) * ((x << 16) >> 24)
        total += ((words >> 16) & 255) * ((x << 8) >> 24)
        total += ((words >> 24) & 255) * (x >> 24)
    return total


@triton.jit
def half_bytes(words, SHIFT: tl.constexpr):
    """Codes minus SHIFT of one half, int32 [4, n] -> int8 [16, n]."""
    zero, one = words & 255, (words >> 8) & 255
    two, three = (words >> 16) & 255, (words >> 24) & 255
    pairs = tl.join(tl.join(zero - SHIFT, two - SHIFT), tl.join(one - SHIFT, three - SHIFT))
    return tl.reshape(tl.permute(pairs, (0, 2, 3, 1)).to(tl.int8), (16, words.shape[1]))


@triton.jit
def both_halves(low, high):
    """Two int8 [16, n] -> [32, n]."""
    joined = tl.permute(tl.join(low, high), (2, 0, 1))
    return tl.reshape(joined, (32, low.shape[1]))


@triton.jit
def block_dots(
    low, high, codes, sums, DOT: tl.constexpr, FMT: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Exact dots int32 [BM, n] of both halves (of the whole, and zero, where a block has one step)
    and the sums int32 [BM, 1] they stand for. codes, sums: pointers [BM] to the rows' block.
    """
    sum_low, sum_high = tl.load(sums)[:, None], tl.load(sums + 1)[:, None]
    if BM == 1:
        words = codes.to(tl.pointer_type(tl.int32)) + tl.arange(0, 4)
        first = tl.sum(dot4(low, tl.load(words)[:, None], DOT), 0)[None, :]
        second = tl.sum(dot4(high, tl.load(words + 4)[:, None], DOT), 0)[None, :]
        if FMT.steps == 1:
            whole = sum_low + sum_high
            return first + second - FMT.zero * whole, second, whole, sum_high
        else:
            return first - FMT.zero * sum_low, second - FMT.zero * sum_high, sum_low, sum_high
    else:
        x = tl.load(codes[:, None] + tl.arange(0, 32)[None, :])
        low_bytes, high_bytes = half_bytes(low, FMT.shift), half_bytes(high, FMT.shift)
        if FMT.steps == 1:
            total = sum_low + sum_high
            whole = tl.dot(x, both_halves(low_bytes, high_bytes), out_dtype=tl.int32)
            whole += (FMT.shift - FMT.zero) * total
            return whole, whole, total, sum_high
        else:
            # A matrix unit takes 32 channels at a time: the other half meets zeros.
            none = tl.zeros_like(low_bytes)
            first = tl.dot(x, both_halves(low_bytes, none), out_dtype=tl.int32)
            second = tl.dot(x, both_halves(none, high_bytes), out_dtype=tl.int32)
            tl.static_assert(FMT.shift == FMT.zero)
            return first, second, sum_low, sum_high


@triton.jit
def int_products(
    tiles, lane, row, codes, scales, sums, blocks,
    FMT: tl.constexpr, DOT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """float32 [BM, BN]; codes, scales, sums as ``numbers.round_rows`` leaves them."""
    BM: tl.constexpr = row.shape[0]
    at = row.to(tl.int64) * blocks
    acc = tl.zeros([BM, lane.shape[0]], tl.float32)
    for b in tl.range(0, blocks, loop_unroll_factor=UNROLL):
        inside = b % FMT.tile_blocks
        tile = tiles + b // FMT.tile_blocks * FMT.tile_nbytes
        low, high = FMT.codes(tile + (FMT.header + inside * FMT.block), lane)
        first, second, sum_first, sum_second = block_dots(
            low, high, codes + (at + b) * 32, sums + (at + b) * 2, DOT, FMT, BM
        )
        scale = tl.load(scales + at + b)[:, None]
        step_first, step_second = FMT.scales(tile, lane, inside)
        acc = tl.fma(first.to(tl.float32), step_first[None, :] * scale, acc)
        if FMT.steps == 2:
            acc = tl.fma(second.to(tl.float32), step_second[None, :] * scale, acc)
        if FMT.has_min:
            min_first, min_second = FMT.minima(tile, lane, inside)
            total = tl.broadcast_to(sum_first.to(tl.float32) * scale, acc.shape)
            acc = tl.fma(tl.broadcast_to(min_first[None, :], acc.shape), total, acc)
            if FMT.steps == 2:
                total = tl.broadcast_to(sum_second.to(tl.float32) * scale, acc.shape)
                acc = tl.fma(tl.broadcast_to(min_second[None, :], acc.shape), total, acc)
    return acc


@triton.jit
def float_block(block, lane, at, channel, cols, part, FMT: tl.constexpr, BM: tl.constexpr):
    """part + the products of one block: [32, BN] not yet summed over channels for one row, else
    [BM, BN]. at: pointers [BM] to the rows of activations.
    """
    w = FMT.elements(block, lane, tl.arange(0, 32))
    inside = (channel < cols)[None, :]
    values = tl.load(at[:, None] + channel[None, :], mask=inside, other=0.0).to(w.dtype)
    if BM == 1:
        part += w.to(tl.float32) * tl.reshape(values, (32, 1)).to(tl.float32)
    else:
        part = tl.dot(values, w, part, input_precision="ieee")
    return part


@triton.jit
def summed(part, BM: tl.constexpr):
    if BM == 1:
        return tl.sum(part, 0)[None, :]
    else:
        return part


@triton.jit
def float_products(
    tiles, lane, row, x, cols, stride, blocks, FMT: tl.constexpr, UNROLL: tl.constexpr
):
    """float32 [BM, BN]; x float32 [rows, stride], of which ``cols`` count."""
    BM: tl.constexpr = row.shape[0]
    HEIGHT: tl.constexpr = 32 if BM == 1 else BM
    k = tl.arange(0, 32)
    at = x + row.to(tl.int64) * stride
    if FMT.tile_scale is None:
        part = tl.zeros([HEIGHT, lane.shape[0]], tl.float32)
        for b in tl.range(0, blocks, loop_unroll_factor=UNROLL):
            block = tiles + b * FMT.block
            part = float_block(block, lane, at, b * 32 + k, cols, part, FMT, BM)
        return summed(part, BM)
    else:
        acc = tl.zeros([BM, lane.shape[0]], tl.float32)
        for t in tl.range(0, blocks // FMT.tile_blocks):
            tile = tiles + t * FMT.tile_nbytes
            part = tl.zeros([HEIGHT, lane.shape[0]], tl.float32)
            for inside in tl.range(0, FMT.tile_blocks, loop_unroll_factor=UNROLL):
                block = tile + (FMT.header + inside * FMT.block)
                channel = (t * FMT.tile_blocks + inside) * 32 + k
                part = float_block(block, lane, at, channel, cols, part, FMT, BM)
            scale = tl.broadcast_to(FMT.tile_scale(tile, lane)[None, :], acc.shape)
            acc = tl.fma(summed(part, BM), scale, acc)
        return acc


@triton.jit
def products(
    tiles, lane, row, x, cols, stride, codes, scales, sums, blocks,
    FMT: tl.constexpr, DOT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """float32 [BM, BN] of rows of x, or of what x was rounded to."""
    if FMT.is_float:
        return float_products(tiles, lane, row, x, cols, stride, blocks, FMT, UNROLL)
    else:
        return int_products(tiles, lane, row, codes, scales, sums, blocks, FMT, DOT, UNROLL)


@triton.jit
def channel_tiles(data, n, rows, row_nbytes):
    """Byte pointers to the rows of tiles of output channels n, the last where n is past the end."""
    tile = tl.minimum(n // 16, (rows + 15) // 16 - 1)
    return data + tile.to(tl.int64) * row_nbytes

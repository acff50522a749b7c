"""Routed experts: gate, up and activation; down per (token, slot); their sum in one order.

A pair is a token and one of its chosen experts, numbered token * TOP_K + slot. With few tokens each
program takes one pair. With many, pairs are sorted by expert and cut into blocks of BM that share
the expert's weights: ``order`` int32 [pairs], and ``spans`` int32 [programs, 3] with each block's
expert (-1 if there is none), first and end place in ``order``.

An expert without a pointer is not here: its pairs are left as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moestro.devices.cuda.kernels.numbers import gate_up, store_block
from moestro.devices.cuda.kernels.products import channel_tiles, products


@triton.jit
def pairs_of(ids, live, order, spans, experts, TOP_K: tl.constexpr, BM: tl.constexpr):
    """This program's expert (-1 if it has nothing to do), pairs [BM], and which of them count."""
    place = tl.program_id(1)
    if BM == 1:
        pair = place + tl.zeros([1], tl.int32)
        valid = pair < tl.load(live) * TOP_K
        expert = tl.max(tl.load(ids + pair, mask=valid, other=-1), 0)
        expert = tl.where(expert < experts, expert, -1)
        return expert, pair, valid
    else:
        expert = tl.load(spans + place * 3)
        first, end = tl.load(spans + place * 3 + 1), tl.load(spans + place * 3 + 2)
        at = first + tl.arange(0, BM)
        valid = at < end
        return expert, tl.load(order + tl.where(valid, at, 0)), valid


@triton.jit
def address_of(pointers, expert):
    """Where an expert's blob begins, zero if it is not here."""
    return tl.load(pointers + expert, mask=expert >= 0, other=0)


@triton.jit
def part_of(address, offset, n, rows, row_nbytes):
    blob = address.to(tl.pointer_type(tl.uint8))
    return channel_tiles(blob + offset, n, rows, row_nbytes)


@triton.jit
def gate_up_experts(
    x, codes, scales, sums, ids, live, order, spans, pointers, gate_bias, up_bias,
    h, h_codes, h_scales, h_sums, experts, rows, cols, gate_offset, gate_blocks, gate_row_nbytes,
    up_offset, up_blocks, up_row_nbytes, up_codes, up_scales, up_sums, h_stride, h_blocks,
    GATE: tl.constexpr, UP: tl.constexpr, ACTIVATION: tl.constexpr, TOP_K: tl.constexpr,
    BIASED: tl.constexpr, H_FLOAT: tl.constexpr,
    BM: tl.constexpr, DOT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """h [pairs, rows] = act(gate, up): float32 [pairs, h_stride], or rounded as by ``round_rows``.

    Grid (rows / 32, pairs or blocks of pairs).
    """
    expert, pair, valid = pairs_of(ids, live, order, spans, experts, TOP_K, BM)
    address = address_of(pointers, expert)
    if address != 0:
        block = tl.program_id(0)
        n = block * 32 + tl.arange(0, 32)
        token = pair // TOP_K
        tiles = part_of(address, gate_offset, n, rows, gate_row_nbytes)
        gate = products(
            tiles, n % 16, token, x, cols, cols, codes, scales, sums, gate_blocks, GATE, DOT, UNROLL
        )
        tiles = part_of(address, up_offset, n, rows, up_row_nbytes)
        up = products(
            tiles, n % 16, token, x, cols, cols, up_codes, up_scales, up_sums, up_blocks,
            UP, DOT, UNROLL,
        )  # fmt: skip
        if BIASED:
            at = expert.to(tl.int64) * rows + n
            gate += tl.load(gate_bias + at, mask=n < rows, other=0.0)[None, :]
            up += tl.load(up_bias + at, mask=n < rows, other=0.0)[None, :]
        value = tl.where((n < rows)[None, :], gate_up(gate, up, ACTIVATION), 0.0)
        if H_FLOAT:
            at = h + pair.to(tl.int64)[:, None] * h_stride + n[None, :]
            tl.store(at, value, mask=valid[:, None] & (n < rows)[None, :])
        else:
            store_block(value, h_codes, h_scales, h_sums, pair, valid, block, h_blocks)


@triton.jit
def down_experts(
    h, h_codes, h_scales, h_sums, ids, live, order, spans, pointers, bias, y,
    experts, rows, cols, offset, h_stride, h_blocks, row_nbytes,
    FMT: tl.constexpr, TOP_K: tl.constexpr, BIASED: tl.constexpr, WHOLE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """y [pairs, rows] = down of h (+ bias), without the router's weight. Grid (rows / BN, pairs).

    WHOLE: all experts should be here; the pairs of one that is not become NaN.
    """
    expert, pair, valid = pairs_of(ids, live, order, spans, experts, TOP_K, BM)
    address = address_of(pointers, expert)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    at = y + pair.to(tl.int64)[:, None] * rows + n[None, :]
    mask = valid[:, None] & (n < rows)[None, :]
    if address != 0:
        tiles = part_of(address, offset, n, rows, row_nbytes)
        value = products(
            tiles, n % 16, pair, h, cols, h_stride, h_codes, h_scales, h_sums, h_blocks,
            FMT, DOT, UNROLL,
        )  # fmt: skip
        if BIASED:
            added = bias + expert.to(tl.int64) * rows + n
            value += tl.load(added, mask=n < rows, other=0.0)[None, :]
        tl.store(at, value, mask=mask)
    elif WHOLE and expert >= 0:
        tl.store(at, tl.full([BM, BN], float("nan"), tl.float32), mask=mask)


@triton.jit
def combine_experts(
    y, ids, weights, live, out, experts, hidden,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, ACCUMULATE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[t] = (out[t] +) sum of weights[t, a] * y[t, a] in ascending expert id, ids below zero
    skipped. Grid (hidden / BN, T). SLOTS: TOP_K as a power of two.

    An id past the experts makes the row NaN: nothing can be raised in a step that is replayed.
    """
    token = tl.program_id(1)
    if token < tl.load(live):
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        slot = tl.arange(0, SLOTS)
        pair = token * TOP_K + slot
        expert = tl.load(ids + pair, mask=slot < TOP_K, other=-1)
        # what is left to add, by expert and then by slot
        key = tl.where(expert >= 0, expert.to(tl.int64) * SLOTS + slot, -1)
        last = tl.max(key, 0) + 1
        key = tl.where(expert >= 0, key, last)
        at = out + token.to(tl.int64) * hidden + n
        total = tl.zeros([BN], tl.float32)
        if ACCUMULATE:
            total = tl.load(at, mask=n < hidden, other=0.0)
        for _ in tl.range(0, TOP_K):
            smallest = tl.min(key, 0)
            if smallest < last:
                chosen = token.to(tl.int64) * TOP_K + smallest % SLOTS
                value = tl.load(y + chosen * hidden + n, mask=n < hidden, other=0.0)
                weight = tl.load(weights + chosen) + tl.zeros([BN], tl.float32)
                total = tl.fma(weight, value, total)
                key = tl.where(key == smallest, last, key)
        if last > experts * SLOTS:
            total = total * float("nan")
        tl.store(at, total, mask=n < hidden)

"""Grouped-query attention over the paged cache (``ops.operands.KvLayer``).

A program takes one token, up to BH heads that share keys, and a segment of SEG positions; segments
are joined in ascending order, by this program (SPLIT false) or by ``join_segments``. Segments begin
at fixed positions, so a token's result does not depend on what else is in the batch.

Over float16 and bfloat16 caches, queries (times their scale) and probabilities are rounded to the
cache's type, as the matrix units take them; sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moestro.devices.cuda.kernels.numbers import tanh


@triton.jit
def raise_max(scores, highest, total):
    """One step of the online softmax (arXiv:1805.02867): probabilities against the new maximum,
    what sums so far shrink by, the new maximum and the new sum.
    """
    new = tl.maximum(highest, tl.max(scores, 1))
    shrink = tl.exp(highest - new)
    probs = tl.exp(scores - new[:, None])
    return probs, shrink, new, total * shrink + tl.sum(probs, 1)


@triton.jit
def join(highest, total, mixed, other_highest, other_total, other_mixed):
    """Two parts of a softmax as one; the second has seen at least one key."""
    new = tl.maximum(highest, other_highest)
    first, second = tl.exp(highest - new), tl.exp(other_highest - new)
    mixed = mixed * first[:, None] + other_mixed * second[:, None]
    return new, total * first + other_total * second, mixed


@triton.jit
def finish(highest, total, mixed, sinks, head, valid, SINKS: tl.constexpr):
    """The weighted mean, after each head's sink has joined as one more key without a value."""
    if SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0)
        new = tl.maximum(highest, sink)
        shrink = tl.exp(highest - new)
        total = total * shrink + tl.exp(sink - new)
        mixed = mixed * shrink[:, None]
    return tl.div_rn(mixed, total[:, None] + tl.zeros_like(mixed))


@triton.jit
def places_of(page_table, slot, position, live, pages_per_slot, page_size):
    """Page and offset of positions that are live."""
    page = tl.load(page_table + slot * pages_per_slot + position // page_size, mask=live, other=0)
    return page.to(tl.int64), position % page_size


@triton.jit
def attend_segment(
    q, k, v, kv_head, page_table, slot, first, last, segment, softcap, pages_per_slot, page_size,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
    SEG: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Maximum and sum [BH], weighted values [BH, BD] of the keys first..last of one segment."""
    d = tl.arange(0, BD)
    highest = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    mixed = tl.zeros([q.shape[0], BD], tl.float32)
    start = tl.maximum(segment * SEG, first) // BK * BK
    for key in tl.range(start, tl.minimum(segment * SEG + SEG, last + 1), BK):
        position = key + tl.arange(0, BK)
        live = (position >= first) & (position <= last)
        page, offset = places_of(page_table, slot, position, live, pages_per_slot, page_size)
        head = (page * KV_HEADS + kv_head) * page_size * D
        mask = live[None, :] & (d < D)[:, None]
        at = head + offset // 16 * (16 * D) + offset % 16
        keys = tl.load(k + at[None, :] + d[:, None] * 16, mask=mask, other=0.0)
        scores = tl.dot(q, keys, input_precision="ieee")
        if CAPPED:
            scores = tanh(tl.div_rn(scores, softcap + tl.zeros_like(scores))) * softcap
        scores = tl.where(live[None, :], scores, float("-inf"))
        probs, shrink, highest, total = raise_max(scores, highest, total)
        mask = live[:, None] & (d < D)[None, :]
        values = tl.load(v + (head + offset * D)[:, None] + d[None, :], mask=mask, other=0.0)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(probs.to(values.dtype), values, mixed, input_precision="ieee")
    return highest, total, mixed


@triton.jit
def attend(
    q, k, v, positions, slots, page_table, live, sinks, out, part_highest, part_total, part_mixed,
    scale, window, softcap, pages_per_slot, page_size, segments,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BH: tl.constexpr, BK: tl.constexpr, SEG: tl.constexpr, SPLIT: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """out [T, HEADS * D]. Grid (T, KV_HEADS * ceil(shared / BH), segments or 1), where ``shared``
    heads share a key. Parts: float32 [T, HEADS, segments] and [T, HEADS, segments, D].
    """
    SHARED: tl.constexpr = HEADS // KV_HEADS
    BLOCKS: tl.constexpr = (SHARED + BH - 1) // BH
    token = tl.program_id(0)
    if token < tl.load(live):
        last, slot = tl.load(positions + token), tl.load(slots + token)
        first = tl.where(window > 0, tl.maximum(last - window + 1, 0), 0)
        kv_head = tl.program_id(1) // BLOCKS
        within = tl.program_id(1) % BLOCKS * BH + tl.arange(0, BH)
        valid, head, d = within < SHARED, kv_head * SHARED + within, tl.arange(0, BD)
        row = (token.to(tl.int64) * HEADS + head)[:, None]
        mask = valid[:, None] & (d < D)[None, :]
        queries = (tl.load(q + row * D + d[None, :], mask=mask, other=0.0) * scale).to(
            k.dtype.element_ty
        )
        if SPLIT:
            segment = tl.program_id(2)
            if (segment >= first // SEG) & (segment <= last // SEG):
                highest, total, mixed = attend_segment(
                    queries, k, v, kv_head, page_table, slot, first, last, segment, softcap,
                    pages_per_slot, page_size, KV_HEADS, D, BD, BK, SEG, CAPPED,
                )  # fmt: skip
                at = row * segments + segment
                tl.store(part_highest + at, highest[:, None], mask=valid[:, None])
                tl.store(part_total + at, total[:, None], mask=valid[:, None])
                tl.store(part_mixed + at * D + d[None, :], mixed, mask=mask)
        else:
            highest, total, mixed = attend_segment(
                queries, k, v, kv_head, page_table, slot, first, last, first // SEG, softcap,
                pages_per_slot, page_size, KV_HEADS, D, BD, BK, SEG, CAPPED,
            )  # fmt: skip
            for segment in tl.range(first // SEG + 1, last // SEG + 1):
                other_highest, other_total, other_mixed = attend_segment(
                    queries, k, v, kv_head, page_table, slot, first, last, segment, softcap,
                    pages_per_slot, page_size, KV_HEADS, D, BD, BK, SEG, CAPPED,
                )  # fmt: skip
                highest, total, mixed = join(
                    highest, total, mixed, other_highest, other_total, other_mixed
                )
            result = finish(highest, total, mixed, sinks, head, valid, SINKS)
            tl.store(out + row * D + d[None, :], result, mask=mask)


@triton.jit
def join_segments(
    positions, live, sinks, out, part_highest, part_total, part_mixed, window, segments,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SEG: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """out [T, HEADS * D] from the parts of ``attend``. Grid (T, HEADS)."""
    token = tl.program_id(0)
    if token < tl.load(live):
        last = tl.load(positions + token)
        first = tl.where(window > 0, tl.maximum(last - window + 1, 0), 0)
        head, d = tl.program_id(1) + tl.zeros([1], tl.int32), tl.arange(0, BD)
        row = token.to(tl.int64) * HEADS + head
        at, mask = row * segments + first // SEG, (d < D)[None, :]
        highest, total = tl.load(part_highest + at), tl.load(part_total + at)
        mixed = tl.load(part_mixed + at[:, None] * D + d[None, :], mask=mask, other=0.0)
        for segment in tl.range(first // SEG + 1, last // SEG + 1):
            at = row * segments + segment
            other = tl.load(part_mixed + at[:, None] * D + d[None, :], mask=mask, other=0.0)
            highest, total, mixed = join(
                highest, total, mixed, tl.load(part_highest + at), tl.load(part_total + at), other
            )
        result = finish(highest, total, mixed, sinks, head, head >= 0, SINKS)
        tl.store(out + row[:, None] * D + d[None, :], result, mask=mask)

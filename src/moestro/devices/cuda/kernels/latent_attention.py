"""Multi-head latent attention over compressed rows (``ops.operands.LatentKvLayer``), absorbed.

Segments, rounding and joining are those of ``attention.py``; a row is key and value of all heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moestro.devices.cuda.kernels.attention import finish, join, places_of, raise_max


@triton.jit
def attend_latent_segment(
    absorbed, rotated, rows, page_table, slot, last, segment, pages_per_slot, page_size,
    RANK: tl.constexpr, ROPE: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
    BK: tl.constexpr, SEG: tl.constexpr,
):  # fmt: skip
    """Maximum and sum [BH], weighted compressed channels [BH, BR] of one segment's rows."""
    r, p = tl.arange(0, BR), tl.arange(0, BP)
    highest = tl.full([absorbed.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([absorbed.shape[0]], tl.float32)
    mixed = tl.zeros([absorbed.shape[0], BR], tl.float32)
    for key in tl.range(segment * SEG, tl.minimum(segment * SEG + SEG, last + 1), BK):
        position = key + tl.arange(0, BK)
        live = position <= last
        page, offset = places_of(page_table, slot, position, live, pages_per_slot, page_size)
        at = rows + ((page * page_size + offset) * (RANK + ROPE))[:, None]
        mask = live[:, None] & (r < RANK)[None, :]
        compressed = tl.load(at + r[None, :], mask=mask, other=0.0)
        mask = live[:, None] & (p < ROPE)[None, :]
        turned = tl.load(at + RANK + p[None, :], mask=mask, other=0.0)
        scores = tl.dot(absorbed, tl.trans(compressed), input_precision="ieee")
        scores = tl.dot(rotated, tl.trans(turned), scores, input_precision="ieee")
        scores = tl.where(live[None, :], scores, float("-inf"))
        probs, shrink, highest, total = raise_max(scores, highest, total)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(probs.to(compressed.dtype), compressed, mixed, input_precision="ieee")
    return highest, total, mixed


@triton.jit
def attend_latent(
    q, absorbed, rows, positions, slots, page_table, live, out,
    part_highest, part_total, part_mixed, scale, pages_per_slot, page_size, segments, q_width,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BR: tl.constexpr,
    BP: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, SEG: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """out [T, HEADS * RANK]. Grid (T, ceil(HEADS / BH), segments or 1). Of q [T, HEADS * q_width]
    the last ROPE channels of each head are read. ``out`` may be ``absorbed``.
    """
    token = tl.program_id(0)
    if token < tl.load(live):
        last, slot = tl.load(positions + token), tl.load(slots + token)
        head = tl.program_id(1) * BH + tl.arange(0, BH)
        r, p, valid = tl.arange(0, BR), tl.arange(0, BP), head < HEADS
        row = (token.to(tl.int64) * HEADS + head)[:, None]
        mask = valid[:, None] & (r < RANK)[None, :]
        element = rows.dtype.element_ty
        compressed = tl.load(absorbed + row * RANK + r[None, :], mask=mask, other=0.0)
        compressed = (compressed * scale).to(element)
        turned = tl.load(
            q + row * q_width + q_width - ROPE + p[None, :],
            mask=valid[:, None] & (p < ROPE)[None, :],
            other=0.0,
        )
        turned = (turned * scale).to(element)
        if SPLIT:
            segment = tl.program_id(2)
            if segment <= last // SEG:
                highest, total, mixed = attend_latent_segment(
                    compressed, turned, rows, page_table, slot, last, segment, pages_per_slot,
                    page_size, RANK, ROPE, BR, BP, BK, SEG,
                )  # fmt: skip
                at = row * segments + segment
                tl.store(part_highest + at, highest[:, None], mask=valid[:, None])
                tl.store(part_total + at, total[:, None], mask=valid[:, None])
                tl.store(part_mixed + at * RANK + r[None, :], mixed, mask=mask)
        else:
            highest, total, mixed = attend_latent_segment(
                compressed, turned, rows, page_table, slot, last, 0, pages_per_slot, page_size,
                RANK, ROPE, BR, BP, BK, SEG,
            )  # fmt: skip
            for segment in tl.range(1, last // SEG + 1):
                other_highest, other_total, other_mixed = attend_latent_segment(
                    compressed, turned, rows, page_table, slot, last, segment, pages_per_slot,
                    page_size, RANK, ROPE, BR, BP, BK, SEG,
                )  # fmt: skip
                highest, total, mixed = join(
                    highest, total, mixed, other_highest, other_total, other_mixed
                )
            result = finish(highest, total, mixed, absorbed, head, valid, False)
            tl.store(out + row * RANK + r[None, :], result, mask=mask)

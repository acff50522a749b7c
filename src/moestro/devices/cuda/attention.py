"""Launches of attention, and its two ops.

Few tokens: a context is divided over programs by segments of fixed positions, which a second kernel
joins. Many: one program per token joins its own. Both add in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moestro.core.errors import UnsupportedOp
from moestro.devices.cuda.kernels import attention as kernels
from moestro.devices.cuda.kernels import latent_attention as latent_kernels
from moestro.devices.cuda.launches import Launch
from moestro.ops.contracts import Batch, KvLayer, LatentKvLayer

#: positions of a segment, and tokens up to which segments are programs of their own
SEGMENT, FEW_TOKENS = 256, 16
#: heads that share a reading of keys: what a matrix unit takes
HEADS = 16


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Maxima, sums and weighted values of each segment, [T, heads, segments (, width)]."""

    highest: Tensor
    total: Tensor
    mixed: Tensor
    segments: int

    @staticmethod
    def allocate(batch: Batch, page_size: int, heads: int, width: int, like: Tensor) -> Parts:
        """Empty ones where each program joins its own."""
        segments = -(-batch.page_table.shape[1] * page_size // SEGMENT)
        shape = (batch.capacity if is_split(batch) else 0, heads, segments)
        return Parts(
            highest=like.new_empty(shape),
            total=like.new_empty(shape),
            mixed=like.new_empty((*shape, width)),
            segments=segments,
        )


def is_split(batch: Batch) -> bool:
    return batch.capacity <= FEW_TOKENS


def attend(
    q: Tensor,
    cache: KvLayer,
    out: Tensor,
    batch: Batch,
    *,
    heads: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> list[Launch]:
    """What ``Ops.attention`` launches. Raises UnsupportedOp for a cache of signed bytes."""
    if cache.is_codes:
        raise UnsupportedOp("attention: no kernel on this device for a cache of signed bytes")
    if heads % cache.kv_heads:
        raise UnsupportedOp(f"attention: {heads} heads do not share {cache.kv_heads} kv heads")
    parts = Parts.allocate(batch, cache.page_size, heads, cache.head_dim, out)
    split = is_split(batch)
    constants = {
        "HEADS": heads, "D": cache.head_dim, "BD": padded(cache.head_dim), "SEG": SEGMENT,
        "SINKS": sinks is not None,
    }  # fmt: skip
    shared: dict[str, Tensor | int | float] = {
        "positions": batch.positions, "live": batch.rows, "sinks": out if sinks is None else sinks,
        "out": out, "part_highest": parts.highest, "part_total": parts.total,
        "part_mixed": parts.mixed, "window": window, "segments": parts.segments,
    }  # fmt: skip
    blocks = -(-(heads // cache.kv_heads) // HEADS)
    attending = Launch(
        kernel=kernels.attend,
        grid=(batch.capacity, cache.kv_heads * blocks, parts.segments if split else 1),
        arguments={
            **shared, "q": q, "k": cache.k, "v": cache.v, "slots": batch.slots,
            "page_table": batch.page_table, "scale": scale, "softcap": float(softcap),
            "pages_per_slot": batch.page_table.shape[1], "page_size": cache.page_size,
        },
        constants={
            **constants, "KV_HEADS": cache.kv_heads, "BH": HEADS, "BK": 32,
            "SPLIT": split, "CAPPED": softcap > 0,
        },
        warps=4,
    )  # fmt: skip
    if not split:
        return [attending]
    joining = Launch(
        kernel=kernels.join_segments,
        grid=(batch.capacity, heads),
        arguments=shared,
        constants=constants,
    )
    return [attending, joining]


def attend_latent(
    q: Tensor,
    absorbed: Tensor,
    cache: LatentKvLayer,
    out: Tensor,
    batch: Batch,
    *,
    heads: int,
    scale: float,
) -> list[Launch]:
    """What ``Ops.latent_attention`` launches."""
    parts = Parts.allocate(batch, cache.page_size, heads, cache.rank, out)
    split = is_split(batch)
    rope_dim = cache.width - cache.rank
    shared: dict[str, Tensor | int | float] = {
        "positions": batch.positions, "live": batch.rows, "out": out,
        "part_highest": parts.highest, "part_total": parts.total, "part_mixed": parts.mixed,
        "segments": parts.segments,
    }  # fmt: skip
    attending = Launch(
        kernel=latent_kernels.attend_latent,
        grid=(batch.capacity, -(-heads // HEADS), parts.segments if split else 1),
        arguments={
            **shared, "q": q, "absorbed": absorbed, "rows": cache.rows, "slots": batch.slots,
            "page_table": batch.page_table, "scale": scale,
            "pages_per_slot": batch.page_table.shape[1], "page_size": cache.page_size,
            "q_width": q.shape[1] // heads,
        },
        constants={
            "HEADS": heads, "RANK": cache.rank, "ROPE": rope_dim, "BR": padded(cache.rank),
            "BP": padded(rope_dim), "BH": HEADS, "SEG": SEGMENT, "SPLIT": split,
            # Rows of float32 take twice the shared memory.
            "BK": 16 if cache.rows.dtype == torch.float32 else 32,
        },
        warps=8,
    )  # fmt: skip
    if not split:
        return [attending]
    joining = Launch(
        kernel=kernels.join_segments,
        grid=(batch.capacity, heads),
        arguments={**shared, "sinks": out, "window": 0},
        constants={
            "HEADS": heads, "D": cache.rank, "BD": padded(cache.rank), "SEG": SEGMENT,
            "SINKS": False,
        },
    )  # fmt: skip
    return [attending, joining]


def padded(width: int) -> int:
    """The next power of two that matrix units take."""
    return max(16, 1 << (width - 1).bit_length())

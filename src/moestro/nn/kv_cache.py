"""One layer's paged cache: its size, and its allocation (layouts: ``ops.contracts.KvLayer``,
``LatentKvLayer``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moestro.core.errors import InvalidRequest
from moestro.formats.base import round_up
from moestro.memory.arena import ALIGNMENT, aligned_buffer
from moestro.ops.contracts import KvLayer, LatentKvLayer
from moestro.ops.kv_cache import KEY_LANES, SCALE_CHANNELS

#: torch.int8 stands for codes with scales, see ``KvLayer``
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)


@dataclass(frozen=True, kw_only=True)
class KvShape:
    """A key and a value for each of ``kv_heads`` heads."""

    kv_heads: int
    head_dim: int

    def position_nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of one position. Raises InvalidRequest for what cannot be allocated."""
        return self.kv_heads * position_nbytes(self.head_dim, dtype)


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """One compressed row for all heads."""

    rank: int
    rope_dim: int

    def position_nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of one position. Raises InvalidRequest for what cannot be allocated."""
        _refuse_codes(dtype)
        return (self.rank + self.rope_dim) * dtype.itemsize


#: what one layer caches
CacheShape = KvShape | LatentShape


def allocate_kv(
    *, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> KvLayer:
    """A zeroed cache of pages * page_size positions.

    Raises InvalidRequest for a page size that is no multiple of 16, no pages, another dtype, or
    int8 with a head_dim that is no multiple of 16.
    """
    _check(pages, page_size, dtype)
    tiles, pairs = page_size // KEY_LANES, (pages, kv_heads)
    if dtype != torch.int8:
        k, v = _on_huge_pages(
            dtype, (*pairs, tiles, head_dim, KEY_LANES), (*pairs, page_size, head_dim)
        )
        return KvLayer(k=k, v=v)
    _require_code_width(head_dim)
    groups = -(-head_dim // SCALE_CHANNELS)
    k, v = _on_huge_pages(
        torch.uint8,
        (*pairs, tiles, head_dim // 4, KEY_LANES, 4),
        (*pairs, page_size // 4, head_dim, 4),
    )
    k_scale, v_scale = _on_huge_pages(
        torch.bfloat16, (*pairs, tiles, groups, KEY_LANES), (*pairs, page_size)
    )
    return KvLayer(k=k, v=v, k_scale=k_scale, v_scale=v_scale)


def _on_huge_pages(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Zeroed tensors in one buffer: on 4 KiB pages, page walks take a sixth of decode's reading.

    The system gives memory when it is first written, so a cache costs what is used of it.
    """
    sizes = [round_up(math.prod(shape) * dtype.itemsize, ALIGNMENT) for shape in shapes]
    tensors = []
    parts = torch.split(aligned_buffer(sum(sizes)), sizes)
    for part, shape in zip(parts, shapes, strict=True):
        tensors.append(part[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
    return tensors


def position_nbytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one position's key and value of one kv head. Raises as ``allocate_kv``."""
    if dtype == torch.int8:
        _require_code_width(head_dim)
        return 2 * head_dim + 2 * (-(-head_dim // SCALE_CHANNELS) + 1)
    return 2 * head_dim * dtype.itemsize


def _require_code_width(head_dim: int) -> None:
    if head_dim % 16:
        raise InvalidRequest(
            f"an int8 KV cache needs a head_dim that is a multiple of 16, not {head_dim}; "
            "choose float16"
        )


def allocate_latent(
    *, pages: int, page_size: int, rank: int, rope_dim: int, dtype: torch.dtype
) -> LatentKvLayer:
    """A zeroed cache of compressed rows; raises as ``allocate_kv``, and for int8."""
    _check(pages, page_size, dtype)
    _refuse_codes(dtype)
    (rows,) = _on_huge_pages(dtype, (pages, page_size, rank + rope_dim))
    return LatentKvLayer(rows=rows, rank=rank)


def _refuse_codes(dtype: torch.dtype) -> None:
    if dtype == torch.int8:
        raise InvalidRequest(
            "an int8 KV cache is not implemented for latent attention, whose rows are compressed "
            "already; choose float16"
        )


def _check(pages: int, page_size: int, dtype: torch.dtype) -> None:
    if page_size < KEY_LANES or page_size % KEY_LANES:
        raise InvalidRequest(f"KV page size {page_size} is not a positive multiple of {KEY_LANES}")
    if pages < 1:
        raise InvalidRequest(f"a KV cache of {pages} pages holds nothing; give it at least 1")
    if dtype not in DTYPES:
        known = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise InvalidRequest(f"KV cache dtype {dtype} is not supported; choose one of {known}")

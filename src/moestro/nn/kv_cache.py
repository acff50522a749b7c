"""Allocation of the paged key/value cache of one layer (layout: ``ops.contracts.KvLayer``)."""

from __future__ import annotations

import torch

from moestro.core.errors import InvalidRequest
from moestro.ops.contracts import KvLayer
from moestro.ops.kv_cache import KEY_LANES, SCALE_CHANNELS

#: torch.int8 stands for codes with scales, see ``KvLayer``
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)


def allocate_kv(
    *, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> KvLayer:
    """A zeroed cache of pages * page_size positions.

    Raises InvalidRequest for a page size that is no multiple of 16, no pages, another dtype, or
    int8 with a head_dim that is no multiple of 16.
    """
    if page_size < KEY_LANES or page_size % KEY_LANES:
        raise InvalidRequest(f"KV page size {page_size} is not a positive multiple of {KEY_LANES}")
    if pages < 1:
        raise InvalidRequest(f"a KV cache of {pages} pages holds nothing; give it at least 1")
    if dtype not in DTYPES:
        known = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise InvalidRequest(f"KV cache dtype {dtype} is not supported; choose one of {known}")
    if dtype == torch.int8:
        return _allocate_codes(pages, page_size, kv_heads, head_dim)
    return KvLayer(
        k=torch.zeros(pages, kv_heads, page_size // KEY_LANES, head_dim, KEY_LANES, dtype=dtype),
        v=torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype),
    )


def _allocate_codes(pages: int, page_size: int, kv_heads: int, head_dim: int) -> KvLayer:
    _require_code_width(head_dim)
    tiles, groups = page_size // KEY_LANES, -(-head_dim // SCALE_CHANNELS)
    return KvLayer(
        k=torch.full((pages, kv_heads, tiles, head_dim // 4, KEY_LANES, 4), 128, dtype=torch.uint8),
        v=torch.full((pages, kv_heads, page_size // 4, head_dim, 4), 128, dtype=torch.uint8),
        k_scale=torch.zeros(pages, kv_heads, tiles, groups, KEY_LANES, dtype=torch.bfloat16),
        v_scale=torch.zeros(pages, kv_heads, page_size, dtype=torch.bfloat16),
    )


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

"""Allocation of the paged key/value cache of one layer (layout: ``ops.contracts.KvLayer``)."""

from __future__ import annotations

import torch

from moestro.core.errors import InvalidRequest
from moestro.ops.contracts import KvLayer

KEY_LANES = 16  # keys stored side by side, so pages are whole multiples of it
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def allocate_kv(
    *, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> KvLayer:
    """A zeroed cache of pages * page_size positions.

    Raises InvalidRequest for a page size that is no multiple of 16, no pages, or another dtype.
    """
    if page_size < KEY_LANES or page_size % KEY_LANES:
        raise InvalidRequest(f"KV page size {page_size} is not a positive multiple of {KEY_LANES}")
    if pages < 1:
        raise InvalidRequest(f"a KV cache of {pages} pages holds nothing; give it at least 1")
    if dtype not in DTYPES:
        known = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise InvalidRequest(f"KV cache dtype {dtype} is not supported; choose one of {known}")
    return KvLayer(
        k=torch.zeros(pages, kv_heads, page_size // KEY_LANES, head_dim, KEY_LANES, dtype=dtype),
        v=torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype),
    )

"""Grouped-query attention over a paged cache (arXiv:2305.13245)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from moestro.nn.buffers import Buffers, Scratch
from moestro.nn.kv_cache import allocate_kv
from moestro.nn.linear import Linear
from moestro.nn.norm import RMSNorm
from moestro.nn.rope import Rope
from moestro.ops.contracts import Batch, KvLayer, LayerCache, Ops

CacheT = TypeVar("CacheT", bound=LayerCache)


class Attention(Protocol[CacheT]):
    """A block that reads and extends a cache of its own kind, and adds its result to the residual
    stream.
    """

    def scratch(self) -> Iterator[Scratch]: ...

    def allocate_cache(self, *, pages: int, page_size: int, dtype: torch.dtype) -> CacheT:
        """A zeroed cache of pages * page_size positions."""
        ...

    def forward(
        self, ops: Ops, x: Tensor, out: Tensor, batch: Batch, cache: CacheT, buffers: Buffers
    ) -> None:
        """out [T, hidden_size] += attention of x [T, hidden_size]; what this step adds to the
        context is cached.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class GroupedQueryAttention:
    """Projections, optional norm of each query and key head, rope, cache and output projection.

    window: only the last ``window`` positions are seen (0: all of them). softcap and sinks: see
    ``Ops.attention``.
    """

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    rope: Rope
    heads: int
    kv_heads: int
    head_dim: int
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def _q(self) -> Scratch:
        return Scratch("attention.q", self.heads * self.head_dim)

    @property
    def _k(self) -> Scratch:
        return Scratch("attention.k", self.kv_heads * self.head_dim)

    @property
    def _v(self) -> Scratch:
        return Scratch("attention.v", self.kv_heads * self.head_dim)

    @property
    def _mixed(self) -> Scratch:
        return Scratch("attention.mixed", self.heads * self.head_dim)

    def scratch(self) -> Iterator[Scratch]:
        yield from (self._q, self._k, self._v, self._mixed)

    def allocate_cache(self, *, pages: int, page_size: int, dtype: torch.dtype) -> KvLayer:
        return allocate_kv(
            pages=pages,
            page_size=page_size,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
        )

    def forward(
        self, ops: Ops, x: Tensor, out: Tensor, batch: Batch, cache: KvLayer, buffers: Buffers
    ) -> None:
        rows = batch.rows
        q, k, v, mixed = (buffers[s] for s in (self._q, self._k, self._v, self._mixed))
        self.q_proj.forward(ops, x, q, rows)
        self.k_proj.forward(ops, x, k, rows)
        self.v_proj.forward(ops, x, v, rows)
        if self.q_norm is not None:
            self.q_norm.forward(ops, q, q, rows)
        if self.k_norm is not None:
            self.k_norm.forward(ops, k, k, rows)
        self.rope.forward(ops, q, batch.positions, rows, heads=self.heads)
        self.rope.forward(ops, k, batch.positions, rows, heads=self.kv_heads)
        ops.write_kv(k, v, cache, batch)
        ops.attention(
            q,
            cache,
            mixed,
            batch,
            heads=self.heads,
            scale=self.head_dim**-0.5,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
        )
        self.o_proj.forward(ops, mixed, out, rows, accumulate=True)

"""Multi-head latent attention (arXiv:2405.04434) over a paged cache of compressed rows.

Keys and values of all heads are projections of one compressed row per position, which alone is
cached. They are never formed: a head's key projection is applied to its query instead, and its
value projection to its weighted sum of compressed rows (section 2.1.2 of the paper).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moestro.nn.buffers import Buffers, Scratch
from moestro.nn.kv_cache import allocate_latent
from moestro.nn.linear import Linear
from moestro.nn.norm import RMSNorm
from moestro.nn.rope import Rope
from moestro.ops.contracts import Batch, LatentKvLayer, Ops, Packed


@dataclass(frozen=True, kw_only=True)
class QueryLora:
    """Queries through a narrow layer: project(norm(down(x)))."""

    down: Linear
    norm: RMSNorm


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """kv_proj projects to rank + rope_dim channels; kv_norm norms the first ``rank`` of them.

    q_proj: to heads * (nope_dim + rope_dim), from x or from what ``q_lora`` makes of it. key_proj
    [heads * rank, nope_dim]: each head's key projection, transposed, so that it applies to queries.
    value_proj [heads * value_dim, rank]. The last rope_dim channels of queries and rows turn.
    """

    q_proj: Linear
    kv_proj: Linear
    kv_norm: RMSNorm
    key_proj: Packed
    value_proj: Packed
    o_proj: Linear
    rope: Rope
    heads: int
    scale: float
    q_lora: QueryLora | None = None

    @property
    def rank(self) -> int:
        """Compressed channels."""
        return self.value_proj.cols

    @property
    def nope_dim(self) -> int:
        """Channels of a head that do not turn."""
        return self.key_proj.cols

    @property
    def _q(self) -> Scratch:
        return Scratch("latent.q", self.q_proj.out_features)

    @property
    def _kv(self) -> Scratch:
        return Scratch("latent.kv", self.kv_proj.out_features)

    @property
    def _absorbed(self) -> Scratch:
        return Scratch("latent.absorbed", self.key_proj.rows)

    @property
    def _mixed(self) -> Scratch:
        return Scratch("latent.mixed", self.value_proj.rows)

    @property
    def _q_down(self) -> Scratch | None:
        lora = self.q_lora
        return None if lora is None else Scratch("latent.q_down", lora.down.out_features)

    def scratch(self) -> Iterator[Scratch]:
        yield from (self._q, self._kv, self._absorbed, self._mixed)
        if self._q_down is not None:
            yield self._q_down

    def allocate_cache(self, *, pages: int, page_size: int, dtype: torch.dtype) -> LatentKvLayer:
        return allocate_latent(
            pages=pages,
            page_size=page_size,
            rank=self.rank,
            rope_dim=self.kv_proj.out_features - self.rank,
            dtype=dtype,
        )

    def forward(
        self, ops: Ops, x: Tensor, out: Tensor, batch: Batch, cache: LatentKvLayer, buffers: Buffers
    ) -> None:
        rows, rope = batch.rows, self.rope
        q, kv, absorbed, mixed = (
            buffers[s] for s in (self._q, self._kv, self._absorbed, self._mixed)
        )
        self._project_queries(ops, x, q, rows, buffers)
        rope.forward(ops, q, batch.positions, rows, heads=self.heads, offset=self.nope_dim)
        self.kv_proj.forward(ops, x, kv, rows)
        ops.write_latent(
            kv,
            self.kv_norm.weight,
            rope.cos,
            rope.sin,
            cache,
            batch,
            eps=self.kv_norm.eps,
            interleaved=rope.interleaved,
        )
        ops.linear_heads(q, self.key_proj, absorbed, rows, heads=self.heads)
        ops.latent_attention(
            q, absorbed, cache, absorbed, batch, heads=self.heads, scale=self.scale
        )
        ops.linear_heads(absorbed, self.value_proj, mixed, rows, heads=self.heads)
        self.o_proj.forward(ops, mixed, out, rows, accumulate=True)

    def _project_queries(
        self, ops: Ops, x: Tensor, q: Tensor, rows: Tensor, buffers: Buffers
    ) -> None:
        if self.q_lora is not None and self._q_down is not None:
            narrow = buffers[self._q_down]
            self.q_lora.down.forward(ops, x, narrow, rows)
            self.q_lora.norm.forward(ops, narrow, narrow, rows)
            x = narrow
        self.q_proj.forward(ops, x, q, rows)

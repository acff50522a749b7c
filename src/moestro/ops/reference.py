"""The slow, obvious torch implementation of every op: the oracle all kernels are compared with.

Each op takes the live rows, computes in ``compute_dtype`` (float32, or float64 to be a sharper
oracle) and copies the result into the float32 buffer it was given. Data that points outside a
buffer (a token id past the vocabulary, a position past the rope table, a page past the cache)
raises InvalidRequest before anything is written.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from moestro.core.errors import UnsupportedOp
from moestro.ops import kv_cache
from moestro.ops.contracts import (
    Batch,
    KvLayer,
    LatentKvLayer,
    LayerCache,
    Packed,
)
from moestro.ops.dispatch import op
from moestro.ops.reference_experts import ExpertOps, live_rows, require_range
from moestro.ops.reference_math import in_top_groups, scored, turned


class ReferenceOps(ExpertOps):
    """All ops of ``contracts.Ops`` on CPU tensors; see there for shapes and meaning."""

    device = "reference"

    @op
    def embed_tokens(self, token_ids: Tensor, weight: Packed, out: Tensor, rows: Tensor) -> None:
        n = live_rows(rows, token_ids, out)
        ids = token_ids[:n].long()
        require_range("token id", ids, weight.rows, "the vocabulary")
        out[:n] = weight.unpack()[ids]

    @op
    def gather_rows(self, x: Tensor, indices: Tensor, out: Tensor, rows: Tensor) -> None:
        n = live_rows(rows, indices, out)
        index = indices[:n].long()
        require_range("row index", index, x.shape[0], "the gathered tensor")
        out[:n] = x[index]

    @op
    def rmsnorm(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        rows: Tensor,
        *,
        eps: float,
        groups: int = 1,
        residual: Tensor | None = None,
    ) -> None:
        n = live_rows(rows, x, out)
        if residual is not None:
            residual[:n] += x[:n]
            x = residual
        parts = self._wide(x[:n]).view(n, groups, x.shape[1] // groups)
        mean_square = parts.square().mean(-1, keepdim=True)
        normed = parts * torch.rsqrt(mean_square + eps) * self._wide(weight)
        out[:n] = normed.flatten(1)

    @op
    def linear(
        self,
        x: Tensor,
        weight: Packed,
        out: Tensor,
        rows: Tensor,
        *,
        bias: Tensor | None = None,
        accumulate: bool = False,
    ) -> None:
        n = live_rows(rows, x, out)
        result = self._wide(x[:n]) @ self._wide(weight.unpack()).T
        if bias is not None:
            result += self._wide(bias)
        if accumulate:
            result += self._wide(out[:n])
        out[:n] = result

    @op
    def linear_heads(
        self, x: Tensor, weight: Packed, out: Tensor, rows: Tensor, *, heads: int
    ) -> None:
        n = live_rows(rows, x, out)
        matrices = self._wide(weight.unpack()).view(heads, -1, weight.cols)
        parts = self._wide(x[:n]).view(n, heads, -1)[..., : weight.cols]
        out[:n] = torch.einsum("thk,hnk->thn", parts, matrices).flatten(1)

    @op
    def rope(
        self,
        x: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: Tensor,
        *,
        heads: int,
        interleaved: bool = False,
        offset: int = 0,
    ) -> None:
        n = live_rows(rows, x, positions)
        where = positions[:n].long()
        require_range("position", where, cos.shape[0], "the rope table")
        by_head = x[:n].view(n, heads, x.shape[1] // heads)
        rotary = by_head[..., offset : offset + 2 * cos.shape[1]]
        c, s = self._wide(cos[where])[:, None], self._wide(sin[where])[:, None]
        rotary.copy_(turned(self._wide(rotary), c, s, interleaved=interleaved))

    @op
    def write_kv(self, k: Tensor, v: Tensor, cache: KvLayer, batch: Batch) -> None:
        n = live_rows(batch.rows, k, v, batch.positions, batch.slots)
        positions, slots = batch.positions[:n].long(), batch.slots[:n].long()
        pages = pages_of(cache, batch, slots, positions)
        keys = k[:n].view(n, cache.kv_heads, cache.head_dim)
        values = v[:n].view(n, cache.kv_heads, cache.head_dim)
        kv_cache.store(cache, pages, positions % cache.page_size, keys, values)

    @op
    def attention(
        self,
        q: Tensor,
        cache: KvLayer,
        out: Tensor,
        batch: Batch,
        *,
        heads: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        n = live_rows(batch.rows, q, out, batch.positions, batch.slots)
        if heads % cache.kv_heads:
            raise UnsupportedOp(f"attention: {heads} heads do not share {cache.kv_heads} kv heads")
        positions, slots = batch.positions[:n].long(), batch.slots[:n].long()
        pages_of(cache, batch, slots, positions)  # validates before anything is written
        queries = self._wide(q[:n]).view(n, heads, cache.head_dim) * scale
        if cache.is_codes:
            queries = self._wide(kv_cache.round_query((q[:n] * scale).view_as(queries)))
        for slot in sorted(set(slots.tolist())):
            rows = (slots == slot).nonzero()[:, 0]
            at = positions[rows]
            first = max(0, int(at.min()) - window + 1) if window > 0 else 0
            context = torch.arange(first, int(at.max()) + 1)
            keys, values = self._gather_context(cache, batch, slot, context)
            shared_by = heads // cache.kv_heads
            keys = keys.repeat_interleave(shared_by, dim=1)
            values = values.repeat_interleave(shared_by, dim=1)
            scores = torch.einsum("thd,chd->htc", queries[rows], keys)
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            hidden = context > at[:, None]
            if window > 0:
                hidden |= context <= at[:, None] - window
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                column = self._wide(sinks)[:, None, None].expand(heads, len(rows), 1)
                scores = torch.cat([scores, column], dim=-1)
            probs = scores.softmax(-1)[..., : len(context)]
            out[rows] = torch.einsum("htc,chd->thd", probs, values).flatten(1).float()

    def _gather_context(
        self, cache: KvLayer, batch: Batch, slot: int, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [len(positions), kv_heads, head_dim] of a slot."""
        pages = pages_of(cache, batch, torch.full_like(positions, slot), positions)
        keys, values = kv_cache.gather(cache, pages, positions % cache.page_size)
        return self._wide(keys), self._wide(values)

    @op
    def write_latent(
        self,
        kv: Tensor,
        norm: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LatentKvLayer,
        batch: Batch,
        *,
        eps: float,
        interleaved: bool = False,
    ) -> None:
        n = live_rows(batch.rows, kv, batch.positions, batch.slots)
        positions, slots = batch.positions[:n].long(), batch.slots[:n].long()
        pages = pages_of(cache, batch, slots, positions)
        require_range("position", positions, cos.shape[0], "the rope table")
        row = self._wide(kv[:n])
        compressed, rotary = row[:, : cache.rank], row[:, cache.rank :]
        mean_square = compressed.square().mean(-1, keepdim=True)
        compressed = compressed * torch.rsqrt(mean_square + eps) * self._wide(norm)
        c, s = self._wide(cos[positions]), self._wide(sin[positions])
        rotary = turned(rotary, c, s, interleaved=interleaved)
        stored = torch.cat([compressed, rotary], dim=1).float().to(cache.rows.dtype)
        cache.rows[pages, positions % cache.page_size] = stored

    @op
    def latent_attention(
        self,
        q: Tensor,
        absorbed: Tensor,
        cache: LatentKvLayer,
        out: Tensor,
        batch: Batch,
        *,
        heads: int,
        scale: float,
    ) -> None:
        n = live_rows(batch.rows, q, absorbed, out, batch.positions, batch.slots)
        positions, slots = batch.positions[:n].long(), batch.slots[:n].long()
        pages_of(cache, batch, slots, positions)  # validates before anything is written
        rope_dim = cache.width - cache.rank
        rotated = self._wide(q[:n]).view(n, heads, -1)[..., -rope_dim:]
        queries = torch.cat([self._wide(absorbed[:n]).view(n, heads, -1), rotated], dim=-1)
        for slot in sorted(set(slots.tolist())):
            tokens = (slots == slot).nonzero()[:, 0]
            context = torch.arange(int(positions[tokens].max()) + 1)
            pages = pages_of(cache, batch, torch.full_like(context, slot), context)
            keys = self._wide(cache.rows[pages, context % cache.page_size])
            scores = torch.einsum("thd,cd->htc", queries[tokens], keys) * scale
            scores = scores.masked_fill(context > positions[tokens, None], -torch.inf)
            mixed = torch.einsum("htc,cd->thd", scores.softmax(-1), keys[:, : cache.rank])
            out[tokens] = mixed.flatten(1).float()

    @op
    def route(
        self,
        logits: Tensor,
        ids: Tensor,
        weights: Tensor,
        rows: Tensor,
        *,
        normalize: bool,
        scoring: str = "softmax",
        bias: Tensor | None = None,
        groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
    ) -> None:
        n, top_k = live_rows(rows, logits, ids, weights), ids.shape[1]
        experts = logits.shape[1]
        if experts % groups:
            raise UnsupportedOp(f"route: {experts} experts do not divide into {groups} groups")
        if not 1 <= top_groups <= groups:
            raise UnsupportedOp(f"route: top {top_groups} of {groups} groups")
        if top_k > experts // groups * top_groups:
            raise UnsupportedOp(f"route: top {top_k} of {experts // groups * top_groups} experts")
        scores = scored(self._wide(logits[:n]), scoring)
        # A larger logit is a larger softmax, so the order is taken before rounding can tie.
        choice = self._wide(logits[:n]) if scoring == "softmax" and bias is None else scores
        if bias is not None:
            choice = choice + self._wide(bias)
        if groups > 1:
            choice = in_top_groups(
                choice, groups, top_groups, best=2 if scoring == "sigmoid" else 1
            )
        order = choice.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
        chosen = scores.gather(1, order)
        if normalize:
            # Sigmoids may all vanish.
            chosen = chosen / (chosen.sum(1, keepdim=True) + (1e-20 if scoring == "sigmoid" else 0))
        ids[:n] = order.int()
        weights[:n] = chosen * scale

    @op
    def silu_mul(self, gate: Tensor, up: Tensor, out: Tensor, rows: Tensor) -> None:
        n = live_rows(rows, gate, up, out)
        out[:n] = silu(self._wide(gate[:n])) * self._wide(up[:n])

    @op
    def sigmoid(self, x: Tensor, rows: Tensor) -> None:
        n = live_rows(rows, x)
        x[:n] = self._wide(x[:n]).sigmoid()


def pages_of(cache: LayerCache, batch: Batch, slots: Tensor, positions: Tensor) -> Tensor:
    """The cache page of each (slot, position), all three checked against their ranges."""
    slot_count, pages_per_slot = batch.page_table.shape
    require_range("sequence slot", slots, slot_count, "the page table")
    require_range("position", positions, pages_per_slot * cache.page_size, "the slot's pages")
    pages = batch.page_table[slots, positions // cache.page_size].long()
    require_range("page", pages, cache.pages, "the cache")
    return pages

"""Signatures, shapes and dtypes of every op, and (from ``operands``) what ops work on.

Shape letters: T token capacity of a batch, H hidden_size, N output channels, K input channels,
E experts, A experts per token (top_k), I intermediate_size, L logit rows.

Every op writes into buffers it is given, allocates nothing, and reads data-dependent sizes from
memory when it runs: ``rows`` is an int32 tensor of one element holding how many leading rows are
live. So an op recorded once into a Program can be replayed for any batch up to its capacity.
All activations are float32, contiguous, row-major. Rows beyond ``rows`` are left untouched.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from moestro.ops.operands import (
    ACTIVATIONS,
    SCORINGS,
    Batch,
    ExpertBiases,
    ExpertTable,
    KvLayer,
    LatentKvLayer,
    LayerCache,
    Packed,
    Projection,
    SharedExperts,
)

__all__ = [
    "ACTIVATIONS",
    "SCORINGS",
    "Batch",
    "ExpertBiases",
    "ExpertTable",
    "KvLayer",
    "LatentKvLayer",
    "LayerCache",
    "Ops",
    "Packed",
    "Program",
    "Projection",
    "SharedExperts",
]


class Program(Protocol):
    """Recorded ops over fixed buffers."""

    def replay(self) -> None:
        """Run all recorded ops once, with the GIL released where the device can."""
        ...


class Ops(Protocol):
    """What a device implements. A missing op raises UnsupportedOp."""

    def record(self) -> AbstractContextManager[Program]:
        """While open, ops are recorded into the yielded Program and not run."""
        ...

    def embed_tokens(self, token_ids: Tensor, weight: Packed, out: Tensor, rows: Tensor) -> None:
        """out[t] = weight[token_ids[t]]; out [T, H]."""
        ...

    def gather_rows(self, x: Tensor, indices: Tensor, out: Tensor, rows: Tensor) -> None:
        """out[i] = x[indices[i]] for i < rows; indices int32 [L], out [L, H]."""
        ...

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
        """out = x / sqrt(mean(x^2) + eps) * weight, per row, or per each of ``groups`` equal parts
        of a row (qk-norm: groups = heads, weight [head_dim]). With ``residual`` [T, H]:
        residual += x first, and the norm is of the residual. out may be x. (arXiv:1910.07467)
        """
        ...

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
        """out[T, N] = (out +) x[T, K] @ weight.T (+ bias [N])."""
        ...

    def linear_heads(
        self, x: Tensor, weight: Packed, out: Tensor, rows: Tensor, *, heads: int
    ) -> None:
        """A linear of its own for each head: weight [heads * N, K] holds N output channels of every
        head, N a multiple of 16; of x [T, heads * X], X >= K, each head's first K channels are
        read; out [T, heads * N].
        """
        ...

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
        """Rotate in place x [T, heads * head_dim]; cos, sin float32 [max_positions, rotary_dim / 2]
        are indexed by position. The rotary_dim channels of each head from ``offset`` on turn: pairs
        (i, i + rotary_dim/2), or (2i, 2i+1) if interleaved. (arXiv:2104.09864)
        """
        ...

    def write_kv(self, k: Tensor, v: Tensor, cache: KvLayer, batch: Batch) -> None:
        """Store k, v [T, kv_heads * head_dim] of every live token at its position's page."""
        ...

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
        """Causal grouped-query attention of q [T, heads * head_dim] over the cached positions
        0..position of each token's own slot (only the last ``window`` of them if > 0);
        out [T, heads * head_dim]. The keys of this step must have been written before.

        softcap: scores, times ``scale``, become softcap * tanh(score / softcap); 0 leaves them as
        they are (arXiv:2408.00118). Over a cache of signed bytes, queries are rounded to bytes too
        (per 32 channels, off by at most amax / 254) and probabilities to 2^-15 of the largest among
        64 keys.

        sinks: float32 [heads]; each joins its head's softmax as the score of one more key that has
        no value (arXiv:2309.17453).
        """
        ...

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
        """Store kv [T, rank + rope_dim] of every live token at its position's page: the first rank
        channels after an rmsnorm with weight ``norm`` [rank], the others turned as by ``rope``.
        """
        ...

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
        """Causal attention of all heads over the cached rows of positions 0..position of each
        token's own slot. The score of a row is ``scale`` times (its compressed channels with the
        head's ``absorbed`` [T, heads * rank] + its rotated channels with the last rope_dim channels
        of the head in q [T, heads * Q]); out [T, heads * rank] is the weighted sum of compressed
        channels, and may be absorbed. The rows of this step must have been written before.
        """
        ...

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
        """The top A experts of each token by the scores of logits [T, E]: ids int32 [T, A] in
        descending order of choice (ties: lower id first), weights float32 [T, A] their scores,
        divided by their sum if ``normalize``, times ``scale``.

        scoring: one of ``SCORINGS``. bias: float32 [E], added to the scores for the choice alone
        (arXiv:2408.15664). groups, top_groups: the experts are ``groups`` equal parts, and only
        those of the ``top_groups`` best are chosen from; a group counts as its best expert, with
        sigmoid scores as the sum of its best two (arXiv:2405.04434, arXiv:2412.19437).
        A row with NaN or without a finite maximum raises InvalidRequest.
        """
        ...

    def moe(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: ExpertTable,
        out: Tensor,
        rows: Tensor,
        *,
        shared: SharedExperts | None = None,
        accumulate: bool = False,
    ) -> None:
        """out[t] = (out[t] +) sum over a, in ascending expert id, of weights[t, a] *
        down(act(gate(x[t]), up(x[t]))) of expert ids[t, a], then the same of the shared experts.
        ids below zero are skipped. The experts say which activation, and may have a bias on each
        product.
        """
        ...

    def moe_slots(
        self, x: Tensor, ids: Tensor, experts: ExpertTable, y: Tensor, rows: Tensor
    ) -> None:
        """y[t, a] = down(act(gate(x[t]), up(x[t]))) of expert ids[t, a], for those whose pointer
        is not zero; other slots of y float32 [T, A, H], and those with ids below zero, are left
        untouched. So several tables, each with a part of a layer's experts, fill one y.
        """
        ...

    def combine_experts(
        self,
        y: Tensor,
        ids: Tensor,
        weights: Tensor,
        out: Tensor,
        rows: Tensor,
        *,
        accumulate: bool = False,
    ) -> None:
        """out[t] = (out[t] +) sum over a, in ascending expert id, of weights[t, a] * y[t, a], y
        float32 [T, A, H]; ids below zero are skipped. After ``moe_slots`` of all experts it is
        what ``moe`` gives, on the cpu device bit for bit.
        """
        ...

    def copy_slots(
        self, source: Tensor, ids: Tensor, experts: ExpertTable, out: Tensor, rows: Tensor
    ) -> None:
        """out[t, a] = source[t, a], both float32 [T, A, H], for the slots that ``moe_slots`` of
        ``experts`` writes.
        """
        ...

    def copy_rows(self, x: Tensor, out: Tensor, rows: Tensor) -> None:
        """out = x, both [T, N] of the same dtype, whatever that is."""
        ...

    def silu_mul(self, gate: Tensor, up: Tensor, out: Tensor, rows: Tensor) -> None:
        """out = silu(gate) * up; all [T, I]."""
        ...

    def sigmoid(self, x: Tensor, rows: Tensor) -> None:
        """x = 1 / (1 + exp(-x)) in place, [T, N]."""
        ...

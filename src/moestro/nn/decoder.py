"""The decoder-only transformer: pre-norm layers around one residual stream.

The residual stream lives in one buffer; each block reads a normed copy of it and accumulates its
result back, so no block ever writes what it still has to read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moestro.core.errors import InvalidRequest
from moestro.nn.attention import Attention
from moestro.nn.buffers import Buffers, Scratch
from moestro.nn.embedding import Embedding, LanguageModelHead
from moestro.nn.mlp import FeedForward
from moestro.nn.norm import RMSNorm
from moestro.ops.contracts import Batch, LayerCache, Ops


@dataclass(frozen=True, kw_only=True)
class DecoderLayer:
    """hidden += attention(norm(hidden)); hidden += feed_forward(norm(hidden))."""

    input_norm: RMSNorm
    attention: Attention[Any]
    post_attention_norm: RMSNorm
    feed_forward: FeedForward

    def scratch(self) -> Iterator[Scratch]:
        yield from self.attention.scratch()
        yield from self.feed_forward.scratch()

    def forward(
        self,
        ops: Ops,
        hidden: Tensor,
        normed: Tensor,
        batch: Batch,
        cache: LayerCache,
        buffers: Buffers,
    ) -> None:
        rows = batch.rows
        self.input_norm.forward(ops, hidden, normed, rows)
        self.attention.forward(ops, normed, hidden, batch, cache, buffers)
        self.post_attention_norm.forward(ops, hidden, normed, rows)
        self.feed_forward.forward(ops, normed, hidden, rows, buffers)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Embedding, layers and head. Issues ops only, so a step can be recorded and replayed."""

    embedding: Embedding
    layers: Sequence[DecoderLayer]
    head: LanguageModelHead
    hidden_size: int
    vocab_size: int

    @property
    def _hidden(self) -> Scratch:
        return Scratch("decoder.hidden", self.hidden_size)

    @property
    def _normed(self) -> Scratch:
        return Scratch("decoder.normed", self.hidden_size)

    def scratch(self) -> Iterator[Scratch]:
        yield from (self._hidden, self._normed)
        for layer in self.layers:
            yield from layer.scratch()

    def allocate_buffers(self, *, tokens: int, logits: int) -> Buffers:
        return Buffers(
            self.scratch(),
            tokens=tokens,
            logits=logits,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
        )

    def allocate_cache(self, *, pages: int, page_size: int, dtype: torch.dtype) -> list[LayerCache]:
        """Zeroed caches, one per layer, each of its attention's own kind."""
        return [
            layer.attention.allocate_cache(pages=pages, page_size=page_size, dtype=dtype)
            for layer in self.layers
        ]

    def forward(
        self, ops: Ops, batch: Batch, cache: Sequence[LayerCache], buffers: Buffers
    ) -> None:
        """Logits of the batch's logit rows into ``buffers.logits``; the step into ``cache``.

        Raises InvalidRequest if the batch can hold more than the buffers.
        """
        if batch.capacity > buffers.tokens or len(batch.logit_rows) > len(buffers.logits):
            raise InvalidRequest(
                f"a batch of up to {batch.capacity} tokens and {len(batch.logit_rows)} logit rows "
                f"does not fit buffers for {buffers.tokens} and {len(buffers.logits)}"
            )
        hidden, normed = buffers[self._hidden], buffers[self._normed]
        self.embedding.forward(ops, batch, hidden)
        for layer, kv in zip(self.layers, cache, strict=True):
            layer.forward(ops, hidden, normed, batch, kv, buffers)
        self.head.forward(ops, hidden, batch, buffers.logit_hidden, buffers.logits)

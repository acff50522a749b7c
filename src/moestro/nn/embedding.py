"""Token embedding and the language model head; tied models give both the same weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moestro.nn.linear import Linear
from moestro.nn.norm import RMSNorm
from moestro.ops.contracts import Batch, Ops, Packed


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """weight [vocab_size, hidden_size]."""

    weight: Packed

    def forward(self, ops: Ops, batch: Batch, out: Tensor) -> None:
        ops.embed_tokens(batch.token_ids, self.weight, out, batch.rows)


@dataclass(frozen=True, kw_only=True)
class LanguageModelHead:
    """Final norm and projection to the vocabulary, only of the rows that ask for logits."""

    norm: RMSNorm
    proj: Linear

    def forward(
        self, ops: Ops, hidden: Tensor, batch: Batch, logit_hidden: Tensor, logits: Tensor
    ) -> None:
        rows = batch.logit_count
        ops.gather_rows(hidden, batch.logit_rows, logit_hidden, rows)
        self.norm.forward(ops, logit_hidden, logit_hidden, rows)
        self.proj.forward(ops, logit_hidden, logits, rows)

"""Which experts a token goes to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moestro.nn.buffers import Buffers, Scratch
from moestro.nn.linear import Linear
from moestro.ops.contracts import Ops


@dataclass(frozen=True, kw_only=True)
class SoftmaxRouter:
    """Softmax over all experts, then the top_k; their weights sum to one if ``normalize``, which is
    the same as a softmax over the top_k logits alone. ``gate`` may have a bias.
    """

    gate: Linear
    top_k: int
    normalize: bool

    @property
    def _logits(self) -> Scratch:
        return Scratch("router.logits", self.gate.out_features)

    @property
    def _ids(self) -> Scratch:
        return Scratch("router.ids", self.top_k, torch.int32)

    @property
    def _weights(self) -> Scratch:
        return Scratch("router.weights", self.top_k)

    def scratch(self) -> Iterator[Scratch]:
        yield from (self._logits, self._ids, self._weights)

    def forward(self, ops: Ops, x: Tensor, rows: Tensor, buffers: Buffers) -> tuple[Tensor, Tensor]:
        """The buffers (ids int32 [T, top_k], weights float32 [T, top_k]) of x [T, hidden_size]."""
        logits, ids, weights = (buffers[s] for s in (self._logits, self._ids, self._weights))
        self.gate.forward(ops, x, logits, rows)
        ops.route(logits, ids, weights, rows, normalize=self.normalize)
        return ids, weights

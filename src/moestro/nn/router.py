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
class Router:
    """The top_k experts by the scores of ``gate``'s logits (see ``Ops.route`` for the options).

    With softmax scores ``normalize`` is the same as a softmax over the top_k logits alone. ``gate``
    may have a bias of its own; ``choice_bias`` float32 [experts] takes part in the choice alone.
    """

    gate: Linear
    top_k: int
    normalize: bool
    scoring: str = "softmax"
    choice_bias: Tensor | None = None
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0

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
        ops.route(
            logits,
            ids,
            weights,
            rows,
            normalize=self.normalize,
            scoring=self.scoring,
            bias=self.choice_bias,
            groups=self.groups,
            top_groups=self.top_groups,
            scale=self.scale,
        )
        return ids, weights

"""Mixture of experts: a router, its experts, and an optional expert that every token passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from moestro.nn.buffers import Buffers, Scratch
from moestro.nn.mlp import Experts, SharedExpert
from moestro.nn.router import Router
from moestro.ops.contracts import Ops


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """out [T, H] += the routed experts' weighted sum (+ the shared expert) of x [T, H]."""

    router: Router
    experts: Experts
    shared: SharedExpert | None = None

    def scratch(self) -> Iterator[Scratch]:
        yield from self.router.scratch()
        if self.shared is not None:
            yield from self.shared.scratch()

    def forward(self, ops: Ops, x: Tensor, out: Tensor, rows: Tensor, buffers: Buffers) -> None:
        ids, weights = self.router.forward(ops, x, rows, buffers)
        shared = None
        if self.shared is not None:
            shared = self.shared.selected(ops, x, rows, buffers)
        self.experts.forward(ops, x, ids, weights, out, rows, shared=shared, accumulate=True)

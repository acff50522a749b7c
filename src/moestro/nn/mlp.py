"""Gated feed-forward blocks that every token passes: a bank of one expert, always selected.

So dense layers, shared experts and routed experts are one op with one kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moestro.nn.buffers import Buffers, Scratch
from moestro.nn.linear import Linear
from moestro.ops.contracts import ExpertTable, Ops, SharedExperts

# Constants: the id of the only expert, and full weight.
_FIRST_EXPERT = Scratch("mlp.first_expert", 1, torch.int32)
_FULL_WEIGHT = Scratch("mlp.full_weight", 1, torch.float32, fill=1)
_GATE = Scratch("mlp.gate", 1)


class Experts(ExpertTable, Protocol):
    """What blocks need of an expert bank (``memory.expert_bank.ExpertBank``)."""

    def forward(
        self,
        ops: Ops,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        out: Tensor,
        rows: Tensor,
        *,
        shared: SharedExperts | None = None,
        accumulate: bool = False,
    ) -> None: ...


class FeedForward(Protocol):
    """A block that adds its result to the residual stream."""

    def scratch(self) -> Iterator[Scratch]: ...

    def forward(self, ops: Ops, x: Tensor, out: Tensor, rows: Tensor, buffers: Buffers) -> None: ...


class SharedExpert(Protocol):
    """A block whose experts can join those of a router in one op."""

    def scratch(self) -> Iterator[Scratch]: ...

    def selected(self, ops: Ops, x: Tensor, rows: Tensor, buffers: Buffers) -> SharedExperts:
        """Its experts, and with what weight each token of x [T, H] passes them."""
        ...


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """out [T, H] += down(act(gate(x)) * up(x)); ``bank`` holds one expert."""

    bank: Experts

    def scratch(self) -> Iterator[Scratch]:
        yield from (_FIRST_EXPERT, _FULL_WEIGHT)

    def selected(self, ops: Ops, x: Tensor, rows: Tensor, buffers: Buffers) -> SharedExperts:
        return SharedExperts(
            experts=self.bank, ids=buffers[_FIRST_EXPERT], weights=buffers[_FULL_WEIGHT]
        )

    def forward(self, ops: Ops, x: Tensor, out: Tensor, rows: Tensor, buffers: Buffers) -> None:
        ids, weights = buffers[_FIRST_EXPERT], buffers[_FULL_WEIGHT]
        self.bank.forward(ops, x, ids, weights, out, rows, accumulate=True)


@dataclass(frozen=True, kw_only=True)
class GatedMlp:
    """out [T, H] += sigmoid(gate(x)) * mlp(x); gate projects to one channel."""

    gate: Linear
    bank: Experts

    def scratch(self) -> Iterator[Scratch]:
        yield from (_FIRST_EXPERT, _GATE)

    def selected(self, ops: Ops, x: Tensor, rows: Tensor, buffers: Buffers) -> SharedExperts:
        weights = buffers[_GATE]
        self.gate.forward(ops, x, weights, rows)
        ops.sigmoid(weights, rows)
        return SharedExperts(experts=self.bank, ids=buffers[_FIRST_EXPERT], weights=weights)

    def forward(self, ops: Ops, x: Tensor, out: Tensor, rows: Tensor, buffers: Buffers) -> None:
        one = self.selected(ops, x, rows, buffers)
        self.bank.forward(ops, x, one.ids, one.weights, out, rows, accumulate=True)

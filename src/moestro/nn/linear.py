"""A linear layer over a packed weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moestro.ops.contracts import Ops, Packed


@dataclass(frozen=True, kw_only=True)
class Linear:
    """out [T, N] = (out +) x [T, K] @ weight.T (+ bias), weight [N, K], bias float32 [N]."""

    weight: Packed
    bias: Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.weight.rows

    def forward(
        self, ops: Ops, x: Tensor, out: Tensor, rows: Tensor, *, accumulate: bool = False
    ) -> None:
        ops.linear(x, self.weight, out, rows, bias=self.bias, accumulate=accumulate)

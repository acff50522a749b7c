"""Root mean square norm, of whole rows or per head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moestro.ops.contracts import Ops


@dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """weight float32 [width / groups]: each of ``groups`` equal parts of a row is normed alone."""

    weight: Tensor
    eps: float
    groups: int = 1

    def forward(self, ops: Ops, x: Tensor, out: Tensor, rows: Tensor) -> None:
        """out may be x."""
        ops.rmsnorm(x, self.weight, out, rows, eps=self.eps, groups=self.groups)

"""The halves of the MoE operator and copies on the native kernels (see ``devices.cpu.ops``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from moestro import _core as core
from moestro.ops.contracts import ExpertTable


class SlotOps(ABC):
    """Ops over slots [T, A, H]; see ``contracts.Ops``."""

    @property
    @abstractmethod
    def _program(self) -> Any:
        """The native program that is being recorded, if any."""

    @abstractmethod
    def _keep(self, experts: ExpertTable) -> None: ...

    def moe_slots(
        self, x: Tensor, ids: Tensor, experts: ExpertTable, y: Tensor, rows: Tensor
    ) -> None:
        self._keep(experts)
        core.moe_slots(self._program, x, expert_table(ids, None, experts), y, rows)

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
        core.combine_experts(self._program, y, ids, weights, out, rows, accumulate=accumulate)

    def copy_slots(
        self, source: Tensor, ids: Tensor, experts: ExpertTable, out: Tensor, rows: Tensor
    ) -> None:
        core.copy_slots(self._program, source, ids, experts.pointers, out, rows)

    def copy_rows(self, x: Tensor, out: Tensor, rows: Tensor) -> None:
        core.copy_rows(self._program, x, out, rows)


def expert_table(ids: Tensor, weights: Tensor | None, experts: ExpertTable) -> Any:
    """Experts and who passes them, as the extension module takes them."""
    return core.ExpertTable(
        ids,
        weights,
        experts.pointers,
        projections(experts),
        experts.activation,
        input_orders=experts.input_orders,
        **biases(experts),
    )


def projections(experts: ExpertTable) -> list[tuple[str, int, int, int]]:
    """(format, rows, cols, offset) of gate, up and down."""
    return [(p.format_name, p.rows, p.cols, p.offset) for p in experts.projections]


def biases(experts: ExpertTable) -> dict[str, Tensor]:
    """Keyword arguments for the experts' biases, if they have any."""
    if experts.biases is None:
        return {}
    return {f"{name}_bias": getattr(experts.biases, name) for name in ("gate", "up", "down")}

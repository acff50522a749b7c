"""One layer's experts in two places: some in an accelerator's memory, the others in RAM, each
computed where it is, in one step.

What crosses between the two is the tokens' x and ids one way and, per chosen expert, its unweighted
result the other way. The accelerator sums all results in ascending expert id, so the bits do not
depend on which expert is where.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from moestro.core.errors import InvalidRequest
from moestro.devices.base import Accelerator
from moestro.formats.base import PackedWeight
from moestro.memory.expert_bank import ExpertBank
from moestro.ops.accelerator import AcceleratorOps
from moestro.ops.contracts import ExpertBiases, Ops, SharedExperts

#: pinned buffers that layers take in turn: the next layer may fill one while this one's is read
_PINNED = 2


class PartialBank(ExpertBank):
    """Those experts of a layer that are in one place; ``ids`` ascend, and the pointers of all
    others are zero. ``buffer``: for their blobs; without one they lie in RAM like a whole bank.
    """

    def __init__(
        self, whole: ExpertBank, ids: Collection[int], *, buffer: Tensor | None = None
    ) -> None:
        self.ids = tuple(sorted(set(ids)))
        if self.ids and not 0 <= self.ids[0] <= self.ids[-1] < whole.num_experts:
            raise InvalidRequest(
                f"{whole.name} has experts 0..{whole.num_experts - 1}; placed were "
                f"{self.ids[0]}..{self.ids[-1]}"
            )
        super().__init__(
            whole.layout,
            len(self.ids),
            activation=whole.activation,
            buffer=buffer,
            name=whole.name,
        )
        stored, self.pointers = self.pointers, torch.zeros(whole.num_experts, dtype=torch.int64)
        self.pointers[list(self.ids)] = stored
        self.num_experts = whole.num_experts
        self._places = {expert: place for place, expert in enumerate(self.ids)}
        for expert in self.ids:
            self.blob(expert).copy_(whole.blob(expert))
        self.biases, self.input_orders = whole.biases, whole.input_orders

    def blob(self, index: int) -> Tensor:
        """One expert's bytes. Raises InvalidRequest if it is in another place."""
        if index not in self._places:
            raise InvalidRequest(f"{self.name}: expert {index} is not in this place")
        start = self._places[index] * self.layout.nbytes
        return self.buffer[start : start + self.layout.nbytes]


@dataclass(frozen=True, kw_only=True)
class _Pinned:
    """Buffers of the host: what the CPU gets, and its results y [T, A, H]."""

    x: Tensor
    ids: Tensor
    rows: Tensor
    y: Tensor


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """Buffers for a step of up to T tokens, and the layers' turns at the pinned ones."""

    pinned: Sequence[_Pinned]
    y: Tensor


class Crossing:
    """The buffers between an accelerator and the CPU that all layers of a model share, made when
    the first layer is recorded.
    """

    def __init__(self, device: Accelerator) -> None:
        self.device = device
        self._buffers: dict[tuple[int, int, int], _Shared] = {}
        self._extra: dict[tuple[int, int, int], Tensor] = {}
        self._one = torch.ones(1, dtype=torch.int32)

    @staticmethod
    def nbytes(tokens: int, top_k: int, hidden_size: int) -> int:
        """Accelerator memory for a model's routed experts; shared ones take as much per expert."""
        return 4 * tokens * top_k * hidden_size

    @property
    def one(self) -> Tensor:
        """The row count of what has one row."""
        return self._one

    def buffers(self, x: Tensor, ids: Tensor) -> _Shared:
        shape = (x.shape[0], ids.shape[1], x.shape[1])
        if shape not in self._buffers:
            pinned, y = self.device.ops.pinned, self._slots("expert results", shape)
            self._buffers[shape] = _Shared(
                pinned=[
                    _Pinned(
                        x=pinned(x),
                        ids=pinned(ids),
                        rows=pinned(self._one.view(1, 1)),
                        y=pinned(y),
                    )
                    for _ in range(_PINNED)
                ],
                y=y,
            )
        return self._buffers[shape]

    def extra(self, x: Tensor, ids: Tensor) -> Tensor:
        """Slots for experts that every token passes."""
        shape = (x.shape[0], ids.shape[1], x.shape[1])
        if shape not in self._extra:
            self._extra[shape] = self._slots("shared experts' results", shape)
        return self._extra[shape]

    def _slots(self, what: str, shape: tuple[int, int, int]) -> Tensor:
        nbytes = self.nbytes(*shape)
        return self.device.memory.allocate(what, nbytes).view(torch.float32).view(shape)


class HybridBank(PartialBank):
    """All experts of a layer: this table holds those in the accelerator's memory, ``far`` the
    others, in RAM. Made from a whole bank, whose memory may go afterwards.

    turn: which of the pinned buffers it uses; neighbouring layers' should differ.
    """

    def __init__(
        self, whole: ExpertBank, near: Collection[int], crossing: Crossing, *, turn: int = 0
    ) -> None:
        near = set(near)
        memory = crossing.device.memory
        super().__init__(
            whole, near, buffer=memory.allocate("experts", whole.layout.nbytes * len(near))
        )
        self.far = PartialBank(whole, set(range(whole.num_experts)) - near)
        self._crossing = crossing
        self._turn = turn % _PINNED

    def set_biases(self, biases: ExpertBiases) -> None:
        super().set_biases(biases)
        self.far.set_biases(biases)

    def set_input_orders(self, orders: Tensor) -> None:
        super().set_input_orders(orders)
        self.far.set_input_orders(orders)

    def expert(self, index: int) -> tuple[PackedWeight, PackedWeight, PackedWeight]:
        """(gate, up, down) of one expert, wherever it is."""
        return super().expert(index) if index in self._places else self.far.expert(index)

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
    ) -> None:
        """See ``ExpertBank.forward``; ``ops`` must be those of the crossing's device."""
        if not self.far.ids:
            ops.moe(x, ids, weights, self, out, rows, shared=shared, accumulate=accumulate)
            return
        here = cast("AcceleratorOps[Any]", ops)
        crossing = self._crossing.buffers(x, ids)
        pinned = crossing.pinned[self._turn]
        one = self._crossing.one
        here.copy_rows(x, pinned.x, rows)
        here.copy_rows(ids, pinned.ids, rows)
        here.copy_rows(rows.view(1, 1), pinned.rows, one)
        work = self._far_work(here, pinned)
        here.submit(work)
        if self.ids:
            here.moe_slots(x, ids, self, crossing.y, rows)
        if shared is not None:
            extra = self._crossing.extra(x, shared.ids)
            here.moe_slots(x, shared.ids, shared.experts, extra, rows)
        here.wait(work)
        here.copy_slots(pinned.y, ids, self.far, crossing.y, rows)
        here.combine_experts(crossing.y, ids, weights, out, rows, accumulate=accumulate)
        if shared is not None:
            here.combine_experts(extra, shared.ids, shared.weights, out, rows, accumulate=True)

    def _far_work(self, ops: AcceleratorOps[Any], pinned: _Pinned) -> Any:
        with ops.host.record() as program:
            ops.host.moe_slots(pinned.x, pinned.ids, self.far, pinned.y, pinned.rows.view(1))
        return ops.host_work(program, reads=[pinned.x, pinned.ids, pinned.rows], writes=[pinned.y])

    def __repr__(self) -> str:
        names = "/".join(part.format_name for part in self.projections)
        return (
            f"<HybridBank {self.name}: {self.num_experts} x {names}, {len(self.ids)} on the "
            f"accelerator>"
        )


def place_experts(
    weights: MutableMapping[str, Any],
    near: Mapping[int, Collection[int]],
    layers: Mapping[str, int],
    device: Accelerator,
) -> None:
    """Divide the banks of a model's routed experts between an accelerator and RAM, in place, one
    after the other, and give back the memory of each whole bank.

    layers: the layer of each bank's key. near: ids of the experts on the accelerator by layer, none
    where a layer is missing. Raises OutOfBudget if the accelerator's memory does not suffice.
    """
    crossing = Crossing(device)
    for turn, (key, layer) in enumerate(layers.items()):
        whole = weights.pop(key)
        weights[key] = HybridBank(whole, near.get(layer, ()), crossing, turn=turn)

"""What the tests of the accelerator's kernels share: moving to where they run, and comparing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from packed_cases import multiplied
from torch import Tensor

from moestro import formats
from moestro.formats.base import PackedWeight
from moestro.memory.expert_bank import ExpertBank
from moestro.ops.contracts import ExpertBiases, Projection

#: formats whose activations are rounded to bfloat16 here
BF16_STEMS = ("bf16", "fp8")


def is_float(*names: str) -> bool:
    return any(formats.get(name).is_float for name in names)


def seen(name: str, x: Tensor) -> Tensor:
    """What a kernel here multiplies of the activations, float64."""
    if name.split("-")[0] in BF16_STEMS:
        return x.bfloat16().double()
    return multiplied(name, x)


@dataclass(frozen=True)
class Moved:
    """A packed matrix whose bytes lie elsewhere."""

    format_name: str
    rows: int
    cols: int
    data: Tensor
    input_order: Tensor | None = None

    def unpack(self) -> Tensor:
        return PackedWeight(
            formats.get(self.format_name), self.rows, self.cols, self.data.cpu()
        ).unpack()


def moved(weight: PackedWeight, place: torch.device) -> Moved:
    return Moved(weight.format_name, weight.rows, weight.cols, weight.data.to(place))


class Table:
    """The experts of a bank, their bytes and addresses elsewhere; with ``kept``, only those."""

    def __init__(self, bank: ExpertBank, place: torch.device, kept: set[int] | None = None) -> None:
        self.buffer = bank.buffer.to(place)
        offsets = bank.pointers - bank.buffer.data_ptr()
        pointers = offsets + self.buffer.data_ptr()
        if kept is not None:
            gone = [e for e in range(bank.num_experts) if e not in kept]
            pointers[gone] = 0
        self.pointers = pointers.to(place)
        self.projections: tuple[Projection, Projection, Projection] = bank.projections
        self.activation = bank.activation
        self.input_orders: Tensor | None = None
        self.biases = None
        if (biases := bank.biases) is not None:
            self.biases = ExpertBiases(
                gate=biases.gate.to(place), up=biases.up.to(place), down=biases.down.to(place)
            )

    def expert(self, index: int) -> tuple[Moved, Moved, Moved]:
        raise NotImplementedError


def rows_of(n: int, place: torch.device) -> Tensor:
    return torch.tensor([n], dtype=torch.int32, device=place)


def unwritten(*shape: int, place: torch.device) -> Tensor:
    return torch.full(shape, torch.nan, device=place)

"""One layer's experts in RAM: one aligned buffer of equal blobs ``gate | up | down``.

The same bytes, in the same order, are the layer's ``experts-LLL.bin`` of a packed model: loading
and streaming an expert are single reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moestro import formats
from moestro.core.errors import CheckpointError, InvalidRequest
from moestro.core.units import format_bytes
from moestro.formats.base import PackedWeight, require_permutations, round_up
from moestro.memory.arena import aligned_buffer
from moestro.memory.numa import Stored, spread
from moestro.ops.contracts import ExpertBiases, Ops, Projection, SharedExperts

#: start of each projection in a blob, bytes: a vector load and a cache line
PART_ALIGNMENT = 64
#: start and size of each blob, bytes: a page, and what direct disk reads need
BLOB_ALIGNMENT = 4096
PROJECTION_NAMES = ("gate", "up", "down")


@dataclass(frozen=True, kw_only=True)
class BlobLayout:
    """Where gate, up and down lie in every expert's blob of one layer."""

    projections: tuple[Projection, Projection, Projection]
    nbytes: int

    @staticmethod
    def plan(parts: Sequence[tuple[str, int, int]]) -> BlobLayout:
        """Lay out (format name, rows, cols) of gate, up and down."""
        placed: list[Projection] = []
        end = 0
        for name, rows, cols in parts:
            offset = round_up(end, PART_ALIGNMENT)
            placed.append(Projection(format_name=name, rows=rows, cols=cols, offset=offset))
            end = offset + formats.get(name).nbytes(rows, cols)
        gate, up, down = placed
        return BlobLayout(projections=(gate, up, down), nbytes=round_up(end, BLOB_ALIGNMENT))

    def part_range(self, index: int) -> tuple[int, int]:
        """Byte range of gate (0), up (1) or down (2) in the blob."""
        part = self.projections[index]
        nbytes = formats.get(part.format_name).nbytes(part.rows, part.cols)
        return part.offset, part.offset + nbytes

    def fill(self, blob: Tensor, parts: Sequence[Tensor]) -> None:
        """Copy three packed matrices (uint8) into a blob [nbytes] and zero what is between."""
        for index, data in enumerate(parts):
            start, stop = self.part_range(index)
            blob[start:stop] = data
        self.zero_gaps(blob)

    def zero_gaps(self, blob: Tensor) -> None:
        """Zero what lies between the parts of a blob, uint8 [nbytes], and behind them."""
        end = 0
        for index in range(len(self.projections)):
            start, stop = self.part_range(index)
            blob[end:start] = 0
            end = stop
        blob[end:] = 0


def _on_nodes(layout: BlobLayout, num_experts: int) -> Tensor:
    """Memory for a bank, its pages on the nodes that read them."""
    buffer = aligned_buffer(layout.nbytes * num_experts)
    stored = []
    for expert in range(num_experts):
        for index, part in enumerate(layout.projections):
            start, stop = (expert * layout.nbytes + at for at in layout.part_range(index))
            stored.append(Stored(start=start, rows=part.rows, nbytes=stop - start))
    spread(buffer, stored)
    return buffer


class ExpertBank:
    """All E experts of one layer; implements ``ops.contracts.ExpertTable``.

    ``buffer`` is uint8 [E * blob nbytes], 4096-aligned; without one the bank takes zeroed memory of
    its own, whose pages come from the NUMA nodes that read them. Views handed out share it.
    ``biases`` and ``input_orders`` lie beside it: they are small, and every tier needs them.
    """

    def __init__(
        self,
        layout: BlobLayout,
        num_experts: int,
        *,
        activation: str = "silu",
        buffer: Tensor | None = None,
        name: str = "experts",
    ) -> None:
        size = layout.nbytes * num_experts
        self.buffer = _on_nodes(layout, num_experts) if buffer is None else buffer
        if self.buffer.dtype != torch.uint8 or self.buffer.numel() != size:
            raise CheckpointError(
                f"{name}: {num_experts} experts take {size} bytes, got {self.buffer.numel()} of "
                f"{self.buffer.dtype}"
            )
        self.layout = layout
        self.activation = activation
        self.biases: ExpertBiases | None = None
        self.input_orders: Tensor | None = None
        self.name = name
        self.num_experts = num_experts
        self.pointers = self.buffer.data_ptr() + layout.nbytes * torch.arange(
            num_experts, dtype=torch.int64
        )

    @property
    def projections(self) -> tuple[Projection, Projection, Projection]:
        """Where gate, up and down lie in each blob."""
        return self.layout.projections

    @property
    def nbytes(self) -> int:
        """Bytes of memory it takes."""
        return self.buffer.numel()

    def set_biases(self, biases: ExpertBiases) -> None:
        """Add these to every expert's products from now on. Raises CheckpointError for any that is
        not float32 of the bank's own shape.
        """
        for name, part in zip(PROJECTION_NAMES, self.projections, strict=True):
            found, shape = getattr(biases, name), (self.num_experts, part.rows)
            if found.dtype != torch.float32 or tuple(found.shape) != shape:
                raise CheckpointError(
                    f"{self.name}: the {name} biases should be float32 {list(shape)}, but are "
                    f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
                )
        self.biases = biases

    def set_input_orders(self, orders: Tensor) -> None:
        """int32 [E, hidden]: the order in which each expert's gate and up have the input channels.
        Raises CheckpointError unless each is a permutation.
        """
        shape = (self.num_experts, self.projections[0].cols)
        require_permutations(orders, shape, self.name)
        self.input_orders = orders

    def _require(self, index: int) -> None:
        if not 0 <= index < self.num_experts:
            raise InvalidRequest(f"{self.name} has experts 0..{self.num_experts - 1}, not {index}")

    def blob(self, index: int) -> Tensor:
        """One expert's bytes, uint8 [layout.nbytes], as a view."""
        self._require(index)
        start = index * self.layout.nbytes
        return self.buffer[start : start + self.layout.nbytes]

    def expert(self, index: int) -> tuple[PackedWeight, PackedWeight, PackedWeight]:
        """(gate, up, down) of one expert as views."""
        gate, up, down = (self._part(index, i) for i in range(3))
        return gate, up, down

    def _part(self, index: int, which: int) -> PackedWeight:
        part = self.projections[which]
        start, stop = self.layout.part_range(which)
        orders = self.input_orders if which < 2 else None
        return PackedWeight(
            format=formats.get(part.format_name),
            rows=part.rows,
            cols=part.cols,
            data=self.blob(index)[start:stop],
            name=f"{self.name}.{index}.{PROJECTION_NAMES[which]}",
            input_order=None if orders is None else orders[index],
        )

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
        """out[T, H] = (out +) the weighted sum of the chosen experts; see ``Ops.moe``."""
        ops.moe(x, ids, weights, self, out, rows, shared=shared, accumulate=accumulate)

    def __repr__(self) -> str:
        names = "/".join(part.format_name for part in self.projections)
        return (
            f"<ExpertBank {self.name}: {self.num_experts} x {names}, {format_bytes(self.nbytes)}>"
        )

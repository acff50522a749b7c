"""The ops of ``ops.contracts`` that have Triton kernels; the others raise UnsupportedOp.

Buffers lie where the kernels run: on the card, or in RAM under Triton's interpreter. Kernels read
live row counts and routing from memory, so a recorded program replays for any batch up to its
capacity; scratch comes from torch's allocator. Nothing is read back, so data that points outside a
buffer cannot be refused here: an expert id past the table, or an expert that is not in memory,
makes its row NaN instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.core.errors import InvalidRequest, UnsupportedOp
from moestro.devices.cuda import attention, launches
from moestro.devices.cuda.formats import TileFormat, tile_format
from moestro.devices.cuda.launches import ExpertFormats, Launch, Rounded
from moestro.ops.contracts import (
    ACTIVATIONS,
    Batch,
    ExpertTable,
    KvLayer,
    LatentKvLayer,
    Packed,
    SharedExperts,
)
from moestro.ops.dispatch import PythonOps, op

#: more experts than any layer has
_ANY_EXPERT = 1 << 20


class CudaOps(PythonOps):
    """dot: how four byte products are summed, ``dp4a`` on NVIDIA cards and ``bytes`` elsewhere."""

    device = "cuda"

    def __init__(self, dot: str = "dp4a") -> None:
        super().__init__()
        self.dot = dot

    def launch(self, launch: Launch) -> None:
        """Run one kernel; compilation for a machine that is not here overrides this."""
        launch.run()

    @op
    def linear(
        self,
        x: Tensor,
        weight: Packed,
        out: Tensor,
        rows: Tensor,
        *,
        bias: Tensor | None = None,
        accumulate: bool = False,
    ) -> None:
        self._linear(x, weight, out, rows, heads=1, bias=bias, accumulate=accumulate)

    @op
    def linear_heads(
        self, x: Tensor, weight: Packed, out: Tensor, rows: Tensor, *, heads: int
    ) -> None:
        if weight.rows % (16 * heads):
            raise UnsupportedOp(
                f"linear_heads: {weight.rows} output channels are not {heads} times a multiple "
                "of 16"
            )
        self._linear(x, weight, out, rows, heads=heads)

    def _linear(
        self,
        x: Tensor,
        weight: Packed,
        out: Tensor,
        rows: Tensor,
        *,
        heads: int,
        bias: Tensor | None = None,
        accumulate: bool = False,
    ) -> None:
        wide = x.shape[1] // heads
        if wide < weight.cols or out.shape[1] != weight.rows:
            raise InvalidRequest(
                f"linear: a weight [{weight.rows}, {weight.cols}] does not map {list(x.shape)} of "
                f"{heads} heads to {list(out.shape)}"
            )
        if weight.input_order is not None:
            if heads > 1:
                raise UnsupportedOp("linear_heads: a matrix whose columns are out of order")
            x = x.index_select(1, weight.input_order)
        fmt = tile_format(weight.format_name, weight.cols)
        rounded = self._rounded(x, rows, fmt, weight.cols, heads=heads)
        self.launch(
            launches.linear(
                x, rounded, weight.data, out, rows, fmt=fmt, rows=weight.rows, cols=weight.cols,
                dot=self.dot, bias=bias, accumulate=accumulate, heads=heads,
            )
        )  # fmt: skip

    def _rounded(
        self, x: Tensor, live: Tensor, fmt: TileFormat, cols: int, *, heads: int = 1
    ) -> Rounded:
        rows = x.shape[0] * heads
        rounded = Rounded.allocate(rows, fmt, cols, x.device)
        if not fmt.is_float:
            stride = x.shape[1] // heads
            self.launch(
                launches.round_rows(
                    x, live, rounded, rows=rows, cols=cols, stride=stride, per_row=heads
                )
            )
        return rounded

    @op
    def attention(
        self,
        q: Tensor,
        cache: KvLayer,
        out: Tensor,
        batch: Batch,
        *,
        heads: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        for launch in attention.attend(
            q, cache, out, batch, heads=heads, scale=scale, window=window, softcap=softcap,
            sinks=sinks,
        ):  # fmt: skip
            self.launch(launch)

    @op
    def latent_attention(
        self,
        q: Tensor,
        absorbed: Tensor,
        cache: LatentKvLayer,
        out: Tensor,
        batch: Batch,
        *,
        heads: int,
        scale: float,
    ) -> None:
        for launch in attention.attend_latent(
            q, absorbed, cache, out, batch, heads=heads, scale=scale
        ):
            self.launch(launch)

    @op
    def moe(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: ExpertTable,
        out: Tensor,
        rows: Tensor,
        *,
        shared: SharedExperts | None = None,
        accumulate: bool = False,
    ) -> None:
        self._add(x, ids, weights, experts, out, rows, accumulate)
        if shared is not None:
            self._add(x, shared.ids, shared.weights, shared.experts, out, rows, True)

    @op
    def moe_slots(
        self, x: Tensor, ids: Tensor, experts: ExpertTable, y: Tensor, rows: Tensor
    ) -> None:
        """y [T, top_k, H] of every slot whose expert has a pointer, without the router's weight;
        other slots are left as they are. So tables with parts of a layer's experts fill one y.
        """
        self._slots(x, ids, experts, y, rows, whole=False)

    @op
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
        """out[t] = (out[t] +) the sum of weights[t, a] * y[t, a] in ascending expert id, ids below
        zero skipped: with ``moe_slots`` of all experts what ``moe`` gives.
        """
        self.launch(
            launches.combine(y, ids, weights, rows, out, experts=_ANY_EXPERT, accumulate=accumulate)
        )

    def _add(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: ExpertTable,
        out: Tensor,
        rows: Tensor,
        accumulate: bool,
    ) -> None:
        y = torch.empty(ids.shape[0], ids.shape[1], out.shape[1], device=x.device)
        self._slots(x, ids, experts, y, rows, whole=True)
        self.launch(
            launches.combine(
                y, ids, weights, rows, out, experts=experts.pointers.shape[0],
                accumulate=accumulate,
            )
        )  # fmt: skip

    def _slots(
        self,
        x: Tensor,
        ids: Tensor,
        experts: ExpertTable,
        y: Tensor,
        rows: Tensor,
        *,
        whole: bool,
    ) -> None:
        """y [T, top_k, H] of every slot whose expert is here, without the router's weight."""
        if experts.activation not in ACTIVATIONS:
            raise UnsupportedOp(
                f"moe: no kernel for activation {experts.activation}; known: "
                f"{', '.join(ACTIVATIONS)}"
            )
        if experts.input_orders is not None:
            raise UnsupportedOp("moe: no kernel for experts whose columns are out of order")
        fmts, inter = ExpertFormats.of(experts), experts.projections[0].rows
        gate, up, down = experts.projections
        if (gate.cols, gate.rows) != (x.shape[1], up.rows) or down.rows != y.shape[2]:
            raise InvalidRequest(
                f"moe: experts of {gate.cols} -> {gate.rows} -> {down.rows} channels do not map "
                f"{list(x.shape)} to {list(y.shape)}"
            )
        pairs, count = ids.numel(), experts.pointers.shape[0]
        few = pairs <= max(launches.FEW_ROWS, 2 * count)
        grouping = launches.alone(ids) if few else launches.group(ids, rows, count)
        for_gate = self._rounded(x, rows, fmts.gate, gate.cols)
        same = fmts.gate.is_float == fmts.up.is_float and (
            launches.padded_blocks(fmts.up, up.cols) == for_gate.blocks
        )
        for_up = for_gate if same else self._rounded(x, rows, fmts.up, up.cols)
        h = torch.empty(pairs if fmts.down.is_float else 1, inter, device=x.device)
        h_rounded = Rounded.allocate(pairs, fmts.down, down.cols, x.device)
        self.launch(
            launches.gate_up(
                x, (for_gate, for_up), ids, rows, experts, grouping, h, h_rounded, fmts=fmts,
                dot=self.dot,
            )
        )  # fmt: skip
        self.launch(
            launches.down(
                h, h_rounded, ids, rows, experts, grouping, y, fmt=fmts.down, whole=whole,
                dot=self.dot,
            )
        )  # fmt: skip

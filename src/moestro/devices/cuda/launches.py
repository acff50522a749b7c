"""Kernel launches: which kernel with which arguments, grid and constants for given buffers.

Everything that depends on shapes and formats is decided here, so that what is compiled ahead of
time, run in Triton's interpreter and run on a card is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moestro.devices.cuda.formats import BLOCK, TileFormat, tile_format
from moestro.devices.cuda.kernels import experts as expert_kernels
from moestro.devices.cuda.kernels import linear as linear_kernels
from moestro.devices.cuda.kernels import numbers
from moestro.formats.base import LANES, round_up
from moestro.ops.contracts import ExpertTable, Projection

#: rows up to which each takes a program of its own, whose dots are done by words
FEW_ROWS = 16
#: rows that share one reading of the weights where there are more
MANY_ROWS = 32
#: output channels of a program. With few rows a warp's lane has a channel to itself, so that dots
#: are summed without leaving it
FEW_CHANNELS, MANY_CHANNELS = 32, 64


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel over ``grid`` programs. ``arguments`` and ``constants`` are by parameter name."""

    kernel: Any = field(repr=False)
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | int | float]
    constants: Mapping[str, Any]
    warps: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """Contraction is off: kernels say fma where a product and a sum are rounded once."""
        return {"num_warps": self.warps, "enable_fp_fusion": False}

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.constants, **self.options)


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """Activations of integer formats: codes int8 [rows, blocks * 32], scales float32
    [rows, blocks], sums int32 [rows, blocks, 2]; of float formats empty.
    """

    codes: Tensor
    scales: Tensor
    sums: Tensor
    blocks: int

    @staticmethod
    def allocate(rows: int, fmt: TileFormat, cols: int, device: torch.device) -> Rounded:
        """Zeros: channels that nobody writes count as nothing."""
        blocks = padded_blocks(fmt, cols)
        size = 0 if fmt.is_float else rows * blocks
        return Rounded(
            codes=torch.zeros(size * BLOCK, dtype=torch.int8, device=device),
            scales=torch.zeros(size, dtype=torch.float32, device=device),
            sums=torch.zeros(2 * size, dtype=torch.int32, device=device),
            blocks=blocks,
        )


def padded_blocks(fmt: TileFormat, cols: int) -> int:
    """Blocks of 32 input channels of a row of tiles."""
    return round_up(cols, fmt.tile_blocks * BLOCK) // BLOCK


def row_nbytes(fmt: TileFormat, cols: int) -> int:
    """Bytes of sixteen output channels."""
    return padded_blocks(fmt, cols) // fmt.tile_blocks * fmt.tile_nbytes


def round_rows(
    x: Tensor, live: Tensor, to: Rounded, *, rows: int, cols: int, stride: int, per_row: int = 1
) -> Launch:
    """Round ``rows`` rows of x, ``stride`` apart, of which ``cols`` channels count."""
    return Launch(
        kernel=numbers.round_rows,
        grid=(rows, to.blocks),
        arguments={
            "x": x, "live": live, "codes": to.codes, "scales": to.scales, "sums": to.sums,
            "cols": cols, "stride": stride, "blocks": to.blocks,
        },
        constants={"PER_ROW": per_row},
    )  # fmt: skip


def linear(
    x: Tensor,
    rounded: Rounded,
    data: Tensor,
    out: Tensor,
    live: Tensor,
    *,
    fmt: TileFormat,
    rows: int,
    cols: int,
    dot: str,
    bias: Tensor | None = None,
    accumulate: bool = False,
    heads: int = 1,
) -> Launch:
    """out[T, rows] from x [T, heads * X] or what it was rounded to."""
    tokens = out.shape[0]
    few = tokens <= FEW_ROWS
    # Parts of heads begin at any multiple of sixteen channels.
    channels = LANES if heads > 1 else FEW_CHANNELS if few else MANY_CHANNELS
    height = 1 if few else MANY_ROWS
    return Launch(
        kernel=linear_kernels.linear,
        grid=(-(-rows // channels), -(-tokens // height)),
        arguments={
            "x": x, "codes": rounded.codes, "scales": rounded.scales, "sums": rounded.sums,
            "data": data, "bias": out if bias is None else bias, "out": out, "live": live,
            "rows": rows, "cols": cols, "stride": x.shape[1] // heads, "blocks": rounded.blocks,
            "row_nbytes": row_nbytes(fmt, cols),
        },
        constants={
            "FMT": fmt, "HEADS": heads, "BIASED": bias is not None, "ACCUMULATE": accumulate,
            "BM": height, "BN": channels, "DOT": dot, "UNROLL": unroll(fmt, height),
        },
        warps=1 if few else 4,
    )  # fmt: skip


def unroll(fmt: TileFormat, height: int) -> int:
    """Blocks whose bytes a program may ask for at once."""
    return 8 if height == 1 and not fmt.is_float else 2


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """How pairs are cut into programs; see ``kernels/experts.py``."""

    order: Tensor
    spans: Tensor
    height: int
    programs: int


def alone(ids: Tensor) -> Grouping:
    """Each pair by itself."""
    return Grouping(order=ids, spans=ids, height=1, programs=ids.numel())


def group(ids: Tensor, live: Tensor, count: int) -> Grouping:
    """Pairs sorted by expert, in blocks of MANY_ROWS; no size is read back from the device."""
    tokens, top_k = ids.shape
    dead = torch.arange(tokens, device=ids.device)[:, None] >= live
    expert = torch.where(dead | (ids < 0) | (ids >= count), count, ids).flatten().long()
    order = expert.argsort(stable=True)
    sizes = torch.zeros(count + 1, dtype=torch.int64, device=ids.device)
    sizes = sizes.scatter_add_(0, expert, torch.ones_like(expert))[:count]
    ends = sizes.cumsum(0)
    blocks = (sizes + MANY_ROWS - 1) // MANY_ROWS
    block_ends = blocks.cumsum(0)
    programs = tokens * top_k // MANY_ROWS + min(count, tokens * top_k)
    program = torch.arange(programs, device=ids.device)
    found = torch.searchsorted(block_ends, program, right=True)
    which = found.clamp(max=count - 1)
    first = ends[which] - sizes[which]
    first = first + (program - block_ends[which] + blocks[which]) * MANY_ROWS
    spans = torch.stack([torch.where(found < count, found, -1), first, ends[which]], dim=1)
    return Grouping(
        order=order.int(), spans=spans.int().contiguous(), height=MANY_ROWS, programs=programs
    )


@dataclass(frozen=True, kw_only=True)
class ExpertFormats:
    """Descriptors of gate, up and down."""

    gate: TileFormat
    up: TileFormat
    down: TileFormat

    @staticmethod
    def of(experts: ExpertTable) -> ExpertFormats:
        gate, up, down = (tile_format(p.format_name, p.cols) for p in experts.projections)
        return ExpertFormats(gate=gate, up=up, down=down)


def gate_up(
    x: Tensor,
    rounded: tuple[Rounded, Rounded],
    ids: Tensor,
    live: Tensor,
    experts: ExpertTable,
    grouping: Grouping,
    h: Tensor,
    h_rounded: Rounded,
    *,
    fmts: ExpertFormats,
    dot: str,
) -> Launch:
    """h of every pair whose expert is here."""
    gate, up, _ = experts.projections
    biases = experts.biases
    return Launch(
        kernel=expert_kernels.gate_up_experts,
        grid=(-(-gate.rows // BLOCK), grouping.programs),
        arguments={
            "x": x, "codes": rounded[0].codes, "scales": rounded[0].scales,
            "sums": rounded[0].sums, "ids": ids, "live": live, "order": grouping.order,
            "spans": grouping.spans, "pointers": experts.pointers,
            "gate_bias": x if biases is None else biases.gate,
            "up_bias": x if biases is None else biases.up,
            "h": h, "h_codes": h_rounded.codes, "h_scales": h_rounded.scales,
            "h_sums": h_rounded.sums, "experts": experts.pointers.shape[0],
            "rows": gate.rows, "cols": gate.cols,
            "gate_offset": gate.offset, "gate_blocks": rounded[0].blocks,
            "gate_row_nbytes": row_nbytes(fmts.gate, gate.cols),
            "up_offset": up.offset, "up_blocks": rounded[1].blocks,
            "up_row_nbytes": row_nbytes(fmts.up, up.cols),
            "up_codes": rounded[1].codes, "up_scales": rounded[1].scales,
            "up_sums": rounded[1].sums, "h_stride": h.shape[1], "h_blocks": h_rounded.blocks,
        },
        constants={
            "GATE": fmts.gate, "UP": fmts.up, "ACTIVATION": experts.activation,
            "TOP_K": ids.shape[1], "BIASED": biases is not None, "H_FLOAT": fmts.down.is_float,
            "BM": grouping.height, "DOT": dot, "UNROLL": unroll(fmts.gate, grouping.height),
        },
        warps=1 if grouping.height == 1 else 4,
    )  # fmt: skip


def down(
    h: Tensor,
    h_rounded: Rounded,
    ids: Tensor,
    live: Tensor,
    experts: ExpertTable,
    grouping: Grouping,
    y: Tensor,
    *,
    fmt: TileFormat,
    whole: bool,
    dot: str,
) -> Launch:
    """y [T, top_k, hidden] of every pair whose expert is here."""
    part: Projection = experts.projections[2]
    few = grouping.height == 1
    channels = FEW_CHANNELS if few else MANY_CHANNELS
    return Launch(
        kernel=expert_kernels.down_experts,
        grid=(-(-part.rows // channels), grouping.programs),
        arguments={
            "h": h, "h_codes": h_rounded.codes, "h_scales": h_rounded.scales,
            "h_sums": h_rounded.sums, "ids": ids, "live": live, "order": grouping.order,
            "spans": grouping.spans, "pointers": experts.pointers,
            "bias": y if experts.biases is None else experts.biases.down, "y": y,
            "experts": experts.pointers.shape[0], "rows": part.rows, "cols": part.cols,
            "offset": part.offset, "h_stride": h.shape[1], "h_blocks": h_rounded.blocks,
            "row_nbytes": row_nbytes(fmt, part.cols),
        },
        constants={
            "FMT": fmt, "TOP_K": ids.shape[1], "BIASED": experts.biases is not None,
            "WHOLE": whole, "BM": grouping.height, "BN": channels, "DOT": dot,
            "UNROLL": unroll(fmt, grouping.height),
        },
        warps=1 if few else 4,
    )  # fmt: skip


def combine(
    y: Tensor,
    ids: Tensor,
    weights: Tensor,
    live: Tensor,
    out: Tensor,
    *,
    experts: int,
    accumulate: bool,
) -> Launch:
    """out [T, hidden] from y [T, top_k, hidden]."""
    tokens, top_k = ids.shape
    hidden = out.shape[1]
    return Launch(
        kernel=expert_kernels.combine_experts,
        grid=(-(-hidden // 256), tokens),
        arguments={
            "y": y, "ids": ids, "weights": weights, "live": live, "out": out,
            "experts": experts, "hidden": hidden,
        },
        constants={
            "TOP_K": top_k, "SLOTS": 1 << (top_k - 1).bit_length(), "ACCUMULATE": accumulate,
            "BN": 256,
        },
    )  # fmt: skip

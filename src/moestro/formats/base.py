"""What a weight format is, and what a packed matrix is.

All formats are tiles of 16 output channels x one K-group, K-groups ascending, then the next 16
channels: so any range of output channels that starts at a multiple of 16 is one contiguous byte
range. Rows are padded to a multiple of 16 and columns to a multiple of the K-group; padding decodes
to zero (and meets zero activations).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

import moestro._core as core
from moestro.core.errors import CheckpointError, OutOfBudget, UnsupportedFormat
from moestro.core.units import format_bytes

LANES = 16
# From here on huge pages can back a buffer, which saves most of the time to touch it first.
_HUGE_PAGE = 1 << 21


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def packed_buffer(nbytes: int) -> Tensor:
    """uint8 [nbytes] of any content, for packed weights. OutOfBudget if there is no memory."""
    try:
        if nbytes >= _HUGE_PAGE:
            return torch.from_numpy(core.allocate_bytes(nbytes))
        return torch.empty(nbytes, dtype=torch.uint8)
    except (MemoryError, RuntimeError) as error:
        raise OutOfBudget(
            f"{format_bytes(nbytes)} for packed weights cannot be allocated; use a smaller format"
        ) from error


def placed(packed: Tensor, out: Tensor | None) -> Tensor:
    """``packed``, in ``out`` if given."""
    return packed if out is None else out.copy_(packed)


class Format(ABC):
    """One packed layout. Instances are immutable and shared; get them by ``formats.get(name)``."""

    #: canonical name, for example ``int4-g32``
    name: str
    #: input channels that share one tile; 0 means the whole row (``-row`` formats)
    group_size: int
    #: names of checkpoint tensor types that pack without loss, for example ``("Q8_0",)``
    exact_from: tuple[str, ...] = ()
    #: weights are kept as floating point numbers, not as integer codes with scales
    is_float: bool = False
    #: whether other weights can be packed in it; if not it is only for what ``exact_from`` names
    quantizes: bool = True

    @abstractmethod
    def tile_nbytes(self, cols: int) -> int:
        """Bytes of one tile for a matrix of ``cols`` input channels."""

    @abstractmethod
    def pack(
        self, weight: Tensor, *, importance: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Quantize float rows [N, K] with error-minimizing scales -> uint8 [nbytes], in ``out`` if
        given.

        ``importance`` float32 [K] weights the squared error of each input channel. Raises
        CheckpointError for non-finite weights, UnsupportedFormat if the format does not quantize.
        """

    def pack_measured(
        self, weight: Tensor, *, importance: Tensor | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, float, float]:
        """``pack``, with the squared error it made and the squared norm of the weights (both of the
        weights as they are: importance does not count).
        """
        packed = self.pack(weight, importance=importance, out=out)
        wide = weight.to(torch.float32).numpy()
        difference = self.unpack(packed, *weight.shape).numpy() - wide
        error, norm = (
            float(np.einsum("nk,nk->", part, part, dtype=np.float64)) for part in (difference, wide)
        )
        return packed, error, norm

    def example(self, rows: int, cols: int) -> Tensor:
        """Packed bytes of some [rows, cols] matrix, always the same, to check kernels with: random
        codes in formats that do not quantize, else normal weights.
        """
        generator = torch.Generator().manual_seed(1)
        return self.pack(torch.randn(rows, cols, generator=generator))

    def packs_natively(self, source_type: str) -> bool:
        """Whether packing from that type runs on the native thread team, for a whole matrix at a
        time. If not it runs in the calling thread, and costs memory in proportion to the matrix.
        """
        return False

    @abstractmethod
    def pack_exact(
        self,
        source_type: str,
        raw: Tensor,
        rows: int,
        cols: int,
        *,
        out: Tensor | None = None,
        alone: bool = False,
    ) -> Tensor:
        """Repack checkpoint bytes (uint8) of a type in ``exact_from`` without loss -> uint8
        [nbytes], in ``out`` if given. alone: in the calling thread, for callers that pack several
        at once.
        """

    def pack_codes(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> Tensor:
        """Pack a weight that is quantized already, without loss -> uint8 [nbytes].

        codes: uint8 [N, K]. scales: float32 [N, G], one per ``group(K)`` input channels. zeros:
        uint8 [N, G], for formats with zero points and only for them. factors: float32 [N], for
        formats with two levels of scales. The value is ``factor * scale * (code - zero)``. Raises
        UnsupportedFormat for a format without codes and for scales that it cannot hold exactly,
        CheckpointError for scales that are not finite.
        """
        raise UnsupportedFormat(f"format {self.name} does not hold integer codes with scales")

    @abstractmethod
    def unpack(self, data: Tensor, rows: int, cols: int) -> Tensor:
        """Reference decode -> float32 [rows, cols]."""

    def group(self, cols: int) -> int:
        """Input channels per tile for a matrix of ``cols`` columns."""
        return self.group_size or round_up(cols, 32)

    def padded_cols(self, cols: int) -> int:
        return round_up(cols, self.group(cols))

    def nbytes(self, rows: int, cols: int) -> int:
        """Packed bytes of a [rows, cols] matrix."""
        tiles = round_up(rows, LANES) // LANES * (self.padded_cols(cols) // self.group(cols))
        return tiles * self.tile_nbytes(cols)

    def bits_per_weight(self, cols: int) -> float:
        return 8 * self.tile_nbytes(cols) / (LANES * self.group(cols))

    def refuse(self, source_type: str) -> UnsupportedFormat:
        """The error for a source this format cannot take without loss."""
        exact = ", ".join(self.exact_from) or "none"
        refused = f"format {self.name} cannot hold {source_type} weights without loss (exact from: "
        if not self.quantizes:
            return UnsupportedFormat(
                f"{refused}{exact}), and weights are not quantized to it; name another format, for "
                "example k2, k3 or k4"
            )
        return UnsupportedFormat(
            f"{refused}{exact}); quantize on purpose with: moestro convert MODEL OUT --format "
            f"{self.name}"
        )


def require_finite(values: Tensor, name: str = "") -> None:
    """Raise CheckpointError if any element is NaN or infinite. ``name`` begins the message."""
    if not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values)).sum())
        prefix = f"{name}: " if name else ""
        raise CheckpointError(f"{prefix}{bad} of {values.numel()} weights are not finite")


def require_permutations(orders: Tensor, shape: tuple[int, ...], name: str) -> None:
    """Raise CheckpointError unless ``orders`` is int32 of that shape and each of its rows holds
    every number below their length once.
    """
    right = orders.dtype == torch.int32 and tuple(orders.shape) == shape
    if not right or not bool((orders.sort(-1).values == torch.arange(shape[-1])).all()):
        raise CheckpointError(
            f"{name}: the order of the input channels should be int32 {list(shape)} with each "
            f"channel once, but is {str(orders.dtype).removeprefix('torch.')} {list(orders.shape)}"
        )


@dataclass(frozen=True)
class PackedWeight:
    """A weight matrix [rows, cols] packed in one format. ``data`` is uint8, 1-D, contiguous.

    input_order: see ``ops.operands.Packed``; a permutation of the columns.
    """

    format: Format = field(repr=False)
    rows: int
    cols: int
    data: Tensor = field(repr=False)
    name: str = "weight"
    input_order: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.input_order is not None:
            require_permutations(self.input_order, (self.cols,), self.name)
        want = self.format.nbytes(self.rows, self.cols)
        if self.data.dtype != torch.uint8 or self.data.numel() != want:
            raise CheckpointError(
                f"{self.name}: {self.format.name} [{self.rows}, {self.cols}] needs {want} bytes, "
                f"got {self.data.numel()} of {self.data.dtype}"
            )

    @property
    def format_name(self) -> str:
        return self.format.name

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def unpack(self) -> Tensor:
        """Decoded float32 [rows, cols], columns in the order of the input."""
        values = self.format.unpack(self.data, self.rows, self.cols)
        if self.input_order is None:
            return values
        ordered = torch.empty_like(values)
        ordered[:, self.input_order.long()] = values
        return ordered

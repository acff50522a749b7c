"""4-bit integers with a float16 scale per group: symmetric, with zero point, or with minimum.

Codes of 32 channels are 256 B: byte ``j*64 + c*4 + i`` (j, i in 0..3) holds channel 4j+i in its low
and 16+4j+i in its high nibble, the pairing that GGUF's Q4_0 and Q4_1 have as well.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
from torch import Tensor

from moestro.core.errors import UnsupportedFormat
from moestro.formats.base import LANES
from moestro.formats.search import (
    fit_affine,
    fit_symmetric,
    fit_zero_point,
    reciprocal,
    round_codes,
)
from moestro.formats.tiles import (
    BLOCK,
    Bytes,
    Floats,
    Scales,
    TiledFormat,
    assemble,
    byte_codes,
    code_blocks,
    f16_bytes,
    f16_values,
    finite_f16,
    halves,
    lane_bytes,
    lane_values,
    lanes_to_quads,
    pair_nibbles,
    quads_to_lanes,
    split_nibbles,
)

_F16_LANES = 2 * LANES

# Where the extreme goes: whole levels so that weights which already lie on a 4-bit grid are found
# exactly, finer ones around the ends of the range, and beyond it (clipping) for wider groups.
_FINE = tuple(7 + n / 4 for n in range(1, 9))
_SYMMETRIC = (
    *(float(-n) for n in range(1, 8)),
    *(-level for level in _FINE),
    *_FINE[:5],
)
_CLIPPED = (*_SYMMETRIC, *(-level for level in (9.5, 10.0, 10.5, 11.0, 12.0, 13.0, 14.5, 16.0)))
_SPREAD = (*(float(n) for n in range(1, 13)), *(13 + n / 2 for n in range(10)))


class IntFormat(TiledFormat):
    prefix: str
    header: int
    bits = 4
    block_nbytes = LANES * BLOCK // 2
    #: checkpoint type -> bytes per 32 channels
    sources: ClassVar[dict[str, int]] = {"Q4_0": 18, "Q4_1": 20}

    def __init__(self, group_size: int) -> None:
        self.name = f"{self.prefix}-g{group_size}" if group_size else f"{self.prefix}-row"
        self.group_size = group_size

    def tile_nbytes(self, cols: int) -> int:
        return self.header + self.group(cols) // BLOCK * self.block_nbytes

    def source_row_nbytes(self, source_type: str, cols: int) -> int:
        return -(-cols // BLOCK) * self.sources[source_type]

    def _grouped(self, x: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor | None]:
        n, k = x.shape
        group = self.group(k)
        w = None if importance is None else importance.view(k // group, group)
        return x.view(n, k // group, group), w

    def _codes(self, tiles: Bytes) -> Floats:
        """float32 codes [N, G, group]."""
        blocks = code_blocks(tiles, self.header, self.block_nbytes)
        codes = self.split_codes(lanes_to_quads(blocks)).astype(np.float32)
        return codes.reshape(codes.shape[0], tiles.shape[1], -1)

    def _lanes(self, codes: Tensor) -> Bytes:
        """float32 codes [N, G, group] -> [B, C, block bytes]."""
        flat = byte_codes(codes).reshape(codes.shape[0], -1)
        return quads_to_lanes(self.join_codes(flat))

    def join_codes(self, codes: Bytes) -> Bytes:
        """uint8 codes [N, K] -> [N, C, bytes per row of a block]."""
        return pair_nibbles(codes)

    def split_codes(self, quads: Bytes) -> Bytes:
        """Inverse of ``join_codes``."""
        return split_nibbles(quads)

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        raise self.refuse(source_type)


class SymmetricFormat(IntFormat):
    """value = scale * (code - middle of ``bits`` bits). Tile: 16 float16 scales, then the codes."""

    header = _F16_LANES

    @property
    def _middle(self) -> int:
        return 1 << (self.bits - 1)

    @abstractmethod
    def levels(self, group: int) -> tuple[float, ...]:
        """Codes that the value of largest magnitude in a group is tried at."""

    def pack_rows(self, x: Tensor, importance: Tensor | None) -> Bytes:
        grouped, w = self._grouped(x, importance)
        lo, hi = -self._middle, self._middle - 1
        scale = fit_symmetric(grouped, w, lo=lo, hi=hi, levels=self.levels(grouped.shape[-1]))
        codes = round_codes(grouped, scale, lo, hi).add_(self._middle)
        return assemble([f16_bytes(halves(scale))], self._lanes(codes))

    def unpack_rows(self, tiles: Bytes) -> Floats:
        scale = f16_values(tiles[:, :, :_F16_LANES])
        values = (self._codes(tiles) - np.float32(self._middle)) * scale[..., None]
        return values.reshape(scale.shape[0], -1)


class MinimumFormat(IntFormat):
    """value = scale * code + minimum. Tile: 16 float16 scales, 16 float16 minima, the codes."""

    header = 2 * _F16_LANES
    pads_with_last = True
    #: numbers of steps that a group's range is tried to be cut into
    spread: ClassVar[tuple[float, ...]]

    def pack_rows(self, x: Tensor, importance: Tensor | None) -> Bytes:
        grouped, w = self._grouped(x, importance)
        hi = (1 << self.bits) - 1
        scale, low = fit_affine(grouped, w, hi=hi, levels=self.spread)
        codes = ((grouped - low) * reciprocal(scale)).round_().clamp_(0, hi)
        headers = [f16_bytes(halves(part)) for part in (scale, low)]
        return assemble(headers, self._lanes(codes))

    def unpack_rows(self, tiles: Bytes) -> Floats:
        scale = f16_values(tiles[:, :, :_F16_LANES])
        low = f16_values(tiles[:, :, _F16_LANES : self.header])
        values = self._codes(tiles) * scale[..., None] + low[..., None]
        return values.reshape(scale.shape[0], -1)


class Int4Format(SymmetricFormat):
    """value = scale * (code - 8). Tile: 16 float16 scales, then the codes."""

    prefix = "int4"
    code_max = 15
    code_middle = 8

    def __init__(self, group_size: int) -> None:
        super().__init__(group_size)
        self.exact_from = ("Q4_0",) if group_size == BLOCK else ()

    def levels(self, group: int) -> tuple[float, ...]:
        return _SYMMETRIC if group == BLOCK else _CLIPPED

    def code_rows(self, codes: Bytes, scale: Scales, zeros: Bytes | None) -> Bytes:
        return assemble([f16_bytes(scale)], quads_to_lanes(pair_nibbles(codes)))

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        blocks = raw.reshape(raw.shape[0], -1, 18)  # Q4_0: float16 d, 16 bytes of nibble pairs
        scale = finite_f16(blocks[:, :, :2], "Q4_0 scale")
        return assemble([f16_bytes(scale)], quads_to_lanes(blocks[:, :, 2:]))


class Int4ZeroFormat(IntFormat):
    """value = scale * (code - zero). Tile: 16 float16 scales, 16 zero points 0..15, the codes."""

    prefix = "int4z"
    header = _F16_LANES + LANES
    code_max = 15

    def pack_rows(self, x: Tensor, importance: Tensor | None) -> Bytes:
        grouped, w = self._grouped(x, importance)
        scale, zero = fit_zero_point(grouped, w, hi=15, levels=_SPREAD)
        codes = (grouped * reciprocal(scale)).round_().add_(zero).clamp_(0, 15)
        headers = [
            f16_bytes(halves(scale)),
            lane_bytes(byte_codes(zero.squeeze(-1)), 1),
        ]
        return assemble(headers, self._lanes(codes))

    def code_rows(self, codes: Bytes, scale: Scales, zeros: Bytes | None) -> Bytes:
        if zeros is None:
            raise UnsupportedFormat(f"format {self.name} needs zero points")
        headers = [f16_bytes(scale), lane_bytes(zeros, 1)]
        return assemble(headers, quads_to_lanes(pair_nibbles(codes)))

    def unpack_rows(self, tiles: Bytes) -> Floats:
        scale = f16_values(tiles[:, :, :_F16_LANES])
        zero = lane_values(tiles[:, :, _F16_LANES : self.header], 1).astype(np.float32)
        values = (self._codes(tiles) - zero[..., None]) * scale[..., None]
        return values.reshape(scale.shape[0], -1)


class Int4MinFormat(MinimumFormat):
    """value = scale * code + minimum. Tile: 16 float16 scales, 16 float16 minima, the codes."""

    prefix = "int4m"
    spread = _SPREAD

    def __init__(self, group_size: int) -> None:
        super().__init__(group_size)
        self.exact_from = ("Q4_1",) if group_size == BLOCK else ()

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        blocks = raw.reshape(raw.shape[0], -1, 20)  # Q4_1: float16 d, float16 m, 16 nibble pairs
        scale = finite_f16(blocks[:, :, :2], "Q4_1 scale")
        low = finite_f16(blocks[:, :, 2:4], "Q4_1 minimum")
        return assemble([f16_bytes(scale), f16_bytes(low)], quads_to_lanes(blocks[:, :, 4:]))


FORMATS: tuple[IntFormat, ...] = (
    *(Int4Format(group) for group in (32, 64, 128, 0)),
    *(Int4ZeroFormat(group) for group in (32, 64, 128)),
    *(Int4MinFormat(group) for group in (32, 64, 128)),
)

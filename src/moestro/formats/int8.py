"""8-bit integers with a float16 scale per group or per row: symmetric, or with zero point."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from moestro.core.errors import UnsupportedFormat
from moestro.formats.base import LANES
from moestro.formats.search import fit_symmetric, fit_zero_point, reciprocal, round_codes
from moestro.formats.tiles import (
    BLOCK,
    Bytes,
    Floats,
    Halves,
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
    quads_to_lanes,
)

_HEADER = 2 * LANES
_BLOCK_NBYTES = LANES * BLOCK
_LEVELS = tuple(float(-n) for n in range(128, 120, -1))
_SPREAD = tuple(float(n) for n in range(248, 256))


class Int8Format(TiledFormat):
    """value = scale * (code - 128). Tile: 16 float16 scales, then per 32 channels 512 B, byte
    ``(k//4)*64 + c*4 + k%4``.
    """

    code_max = 255
    code_middle: int | None = 128

    def __init__(self, group_size: int) -> None:
        self.name = f"int8-g{group_size}" if group_size else "int8-row"
        self.group_size = group_size
        self.exact_from = ("Q8_0",) if group_size == BLOCK else ()

    def tile_nbytes(self, cols: int) -> int:
        return _HEADER + self.group(cols) // BLOCK * _BLOCK_NBYTES

    def source_row_nbytes(self, source_type: str, cols: int) -> int:
        return -(-cols // BLOCK) * 34

    def pack_rows(self, x: Tensor, importance: Tensor | None) -> Bytes:
        n, k = x.shape
        group = self.group(k)
        grouped = x.view(n, k // group, group)
        w = None if importance is None else importance.view(k // group, group)
        scale = fit_symmetric(grouped, w, lo=-128, hi=127, levels=_LEVELS)
        codes = byte_codes(round_codes(grouped, scale, -128, 127).add_(128))
        return self._tiles(halves(scale), codes.reshape(n, k // BLOCK, BLOCK))

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        blocks = raw.reshape(raw.shape[0], -1, 34)  # Q8_0: float16 d, 32 signed bytes
        scale = finite_f16(blocks[:, :, :2], "Q8_0 scale")
        return self._tiles(scale, blocks[:, :, 2:] ^ np.uint8(128))

    def code_rows(self, codes: Bytes, scale: Scales, zeros: Bytes | None) -> Bytes:
        return self._tiles(scale, codes.reshape(codes.shape[0], -1, BLOCK))

    def unpack_rows(self, tiles: Bytes) -> Floats:
        scale = f16_values(tiles[:, :, :_HEADER])
        codes = lanes_to_quads(code_blocks(tiles, _HEADER, _BLOCK_NBYTES))
        values = codes.astype(np.float32).reshape(*scale.shape, -1) - np.float32(128)
        return (values * scale[..., None]).reshape(scale.shape[0], -1)

    @staticmethod
    def _tiles(scale: Halves, codes: Bytes) -> Bytes:
        return assemble([f16_bytes(scale)], quads_to_lanes(codes))


class Int8ZeroFormat(Int8Format):
    """value = scale * (code - zero). Tile: 16 float16 scales, 16 zero points 0..255, the codes."""

    code_middle = None

    def __init__(self, group_size: int) -> None:
        self.name = f"int8z-g{group_size}"
        self.group_size = group_size

    def tile_nbytes(self, cols: int) -> int:
        return super().tile_nbytes(cols) + LANES

    def pack_rows(self, x: Tensor, importance: Tensor | None) -> Bytes:
        n, k = x.shape
        group = self.group(k)
        grouped = x.view(n, k // group, group)
        w = None if importance is None else importance.view(k // group, group)
        scale, zero = fit_zero_point(grouped, w, hi=255, levels=_SPREAD)
        codes = (grouped * reciprocal(scale)).round_().add_(zero).clamp_(0, 255)
        return self.code_rows(
            byte_codes(codes).reshape(n, k), halves(scale), byte_codes(zero.squeeze(-1))
        )

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        raise self.refuse(source_type)

    def code_rows(self, codes: Bytes, scale: Scales, zeros: Bytes | None) -> Bytes:
        if zeros is None:
            raise UnsupportedFormat(f"format {self.name} needs zero points")
        blocks = codes.reshape(codes.shape[0], -1, BLOCK)
        return assemble([f16_bytes(scale), lane_bytes(zeros, 1)], quads_to_lanes(blocks))

    def unpack_rows(self, tiles: Bytes) -> Floats:
        header = _HEADER + LANES
        scale = f16_values(tiles[:, :, :_HEADER])
        zero = lane_values(tiles[:, :, _HEADER:header], 1).astype(np.float32)
        codes = lanes_to_quads(code_blocks(tiles, header, _BLOCK_NBYTES)).astype(np.float32)
        values = codes.reshape(*scale.shape, -1) - zero[..., None]
        return (values * scale[..., None]).reshape(scale.shape[0], -1)


FORMATS = (
    *(Int8Format(group) for group in (32, 64, 128, 0)),
    *(Int8ZeroFormat(group) for group in (32, 64, 128)),
)

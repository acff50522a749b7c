"""8-bit integers with a float16 scale per group or per row: value = scale * (code - 128)."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from moestro.formats.base import LANES
from moestro.formats.search import fit_symmetric, round_codes
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
    lanes_to_quads,
    quads_to_lanes,
)

_HEADER = 2 * LANES
_BLOCK_NBYTES = LANES * BLOCK
_LEVELS = tuple(float(-n) for n in range(128, 120, -1))


class Int8Format(TiledFormat):
    """Tile: 16 float16 scales, then per 32 channels 512 B, byte ``(k//4)*64 + c*4 + k%4``."""

    code_max = 255
    code_middle = 128

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


FORMATS = tuple(Int8Format(group) for group in (32, 64, 128, 0))

"""8-bit floats (e4m3, without infinities) with a float32 scale per group or per row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moestro.core.errors import CheckpointError
from moestro.formats.base import LANES
from moestro.formats.tiles import (
    BLOCK,
    Bytes,
    Floats,
    Scales,
    TiledFormat,
    assemble,
    code_blocks,
)

_HEADER = 4 * LANES
_BLOCK_NBYTES = LANES * BLOCK
_LARGEST = 448.0
#: kernels multiply scales by 2^8
_SCALE_LIMIT = 2.0**120
_NAN = 0x7F


def _decode_table() -> Floats:
    """e4m3 byte -> float32: sign, exponent of 4 bits with bias 7, mantissa of 3; 0x7f is NaN."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    positive = np.where(exponent > 0, normal, np.ldexp(mantissa / 8, -6))
    positive[_NAN] = np.nan
    return np.concatenate([positive, -positive]).astype(np.float32)


_VALUES = _decode_table()


class Fp8Format(TiledFormat):
    """value = scale * e4m3, rounded to float32. Tile: 16 float32 scales, then per 32 channels
    512 B, byte ``k * 16 + c``.
    """

    is_float = True
    code_max = 255
    code_middle = 0

    def __init__(self, group_size: int) -> None:
        self.name = f"fp8-g{group_size}" if group_size else "fp8-row"
        self.group_size = group_size

    def tile_nbytes(self, cols: int) -> int:
        return _HEADER + self.group(cols) // BLOCK * _BLOCK_NBYTES

    def source_row_nbytes(self, source_type: str, cols: int) -> int:
        raise self.refuse(source_type)

    def pack_rows(self, x: Tensor, importance: Tensor | None) -> Bytes:
        n, k = x.shape
        grouped = x.view(n, -1, self.group(k))
        scale = grouped.abs().amax(dim=-1) / _LARGEST
        divisor = torch.where(scale > 0, scale, torch.ones(()))[..., None]
        scaled = (grouped / divisor).clamp_(-_LARGEST, _LARGEST)
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8).view(n, k)
        return self.code_rows(codes.numpy(), scale.numpy(), None)

    def code_rows(self, codes: Bytes, scale: Scales, zeros: Bytes | None) -> Bytes:
        bad = int(np.count_nonzero((codes & _NAN) == _NAN))
        if bad:
            raise CheckpointError(f"{bad} of {codes.size} weights are not finite")
        n, k = codes.shape
        lanes = codes.reshape(n // LANES, LANES, k // BLOCK, BLOCK).transpose(0, 2, 3, 1)
        header = scale.reshape(n // LANES, LANES, -1).transpose(0, 2, 1)
        blocks = np.ascontiguousarray(lanes).reshape(n // LANES, k // BLOCK, _BLOCK_NBYTES)
        return assemble([np.ascontiguousarray(header).view(np.uint8)], blocks)

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        raise self.refuse(source_type)

    def unpack_rows(self, tiles: Bytes) -> Floats:
        b, g, _ = tiles.shape
        scale = np.ascontiguousarray(tiles[:, :, :_HEADER]).view(np.float32).transpose(0, 2, 1)
        blocks = code_blocks(tiles, _HEADER, _BLOCK_NBYTES).reshape(b, -1, BLOCK, LANES)
        codes = blocks.transpose(0, 3, 1, 2).reshape(b * LANES, g, -1)
        values = _VALUES[codes] * scale.reshape(b * LANES, g, 1)
        return values.reshape(b * LANES, -1)

    def stored_scales(self, scales: Floats) -> Scales:
        if not (np.abs(scales) < _SCALE_LIMIT).all():
            raise CheckpointError("some scales are not finite, or beyond all reason")
        return scales


FORMATS = tuple(Fp8Format(group) for group in (32, 64, 128, 0))

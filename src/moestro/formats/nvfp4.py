"""nvfp4: GGUF's NVFP4 in our tiles. value = e4m3 / 2 * table[index], a scale per 16 channels.

The table holds twice the values of e2m1, 4-bit floats of one sign, two exponent and one mantissa
bit, so that they are whole numbers. Scales are bytes of e4m3, 64 channels a tile. ggml reads them
as unsigned, without the codes for NaN: 0x7f as zero, 0xff as 480. Here the top bit is a sign that
is never set, and 0x7f stands for 480.
"""

from __future__ import annotations

import numpy as np

from moestro.formats.base import LANES
from moestro.formats.held import HeldFormat
from moestro.formats.tiles import (
    BLOCK,
    Bytes,
    Floats,
    Halves,
    assemble,
    code_blocks,
    lane_bytes,
    lane_values,
    lanes_to_quads,
    pair_nibbles,
    quads_to_lanes,
    split_nibbles,
)

_GROUP = 64
_SUB = 16
_SUBS = _GROUP // _SUB
_BLOCK_NBYTES = LANES * BLOCK // 2
_HEADER = _SUBS * LANES
_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)
_LOW = np.uint8(15)


class Nvfp4Format(HeldFormat):
    """Tile: 4 x 16 scales, 2 blocks of indices, four bits each."""

    name = "nvfp4"
    group_size = _GROUP
    exact_from = ("NVFP4",)

    def tile_nbytes(self, cols: int) -> int:
        return _HEADER + _GROUP // BLOCK * _BLOCK_NBYTES

    def source_row_nbytes(self, source_type: str, cols: int) -> int:
        return -(-cols // _GROUP) * 36

    def set_scales(self, tiles: Bytes, scales: Halves) -> None:
        tiles[:, :, :_HEADER] = tiles[:, :, :_HEADER] % 16 + 0x30  # 0.5 to 1.9

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        n = raw.shape[0]
        # NVFP4: 4 scales, 4 x 8 bytes with channels 0..7 in the low and 8..15 in the high nibbles
        blocks = raw.reshape(n, -1, 36)
        stored = blocks[:, :, :_SUBS]
        scales = np.where(stored == 0x7F, np.uint8(0), stored & np.uint8(0x7F)).reshape(n, -1)
        pairs = blocks[:, :, _SUBS:].reshape(n, -1, _SUB // 2)
        codes = np.concatenate([pairs & _LOW, pairs >> np.uint8(4)], axis=-1).reshape(n, -1)
        return assemble([lane_bytes(scales, _SUBS)], quads_to_lanes(pair_nibbles(codes)))

    def unpack_rows(self, tiles: Bytes) -> Floats:
        step = _e4m3(lane_values(tiles[:, :, :_HEADER], _SUBS)) * np.float32(0.5)
        indices = split_nibbles(lanes_to_quads(code_blocks(tiles, _HEADER, _BLOCK_NBYTES)))
        values: Floats = _VALUES[indices].reshape(*step.shape, _SUB) * step[..., None]
        return values.reshape(len(step), -1)


def _e4m3(codes: Bytes) -> Floats:
    """Finite e4m3 numbers: sign, four bits of exponent with bias 7, three of mantissa."""
    exponent, mantissa = codes.astype(np.int32) >> 3 & 15, codes & np.uint8(7)
    whole = mantissa.astype(np.float32) + np.where(exponent > 0, np.float32(8), np.float32(0))
    value = np.ldexp(whole, np.maximum(exponent, 1) - 10)
    return np.where(codes & np.uint8(0x80), -value, value).astype(np.float32)


FORMATS: tuple[HeldFormat, ...] = (Nvfp4Format(),)

"""ternary: GGUF's TQ1_0 and TQ2_0 in our tiles. value = scale * (code - 1), 256 channels a tile.

Both have one float16 scale per 256 channels and weights of -1, 0 and 1. TQ1_0 keeps five of them in
a byte; here they take two bits each as in TQ2_0 (2.06 bits per weight for 1.69), which one shift
and one mask decode. Code 3, which no quantizer writes, is twice the scale, as ggml reads it.
"""

from __future__ import annotations

import numpy as np

from moestro.formats.base import LANES
from moestro.formats.held import HeldFormat
from moestro.formats.kquant_affine import pair_codes
from moestro.formats.tiles import (
    BLOCK,
    Bytes,
    Floats,
    assemble,
    code_blocks,
    f16_bytes,
    f16_values,
    finite_f16,
    join_bits,
    lanes_to_quads,
    quads_to_lanes,
    split_bits,
)

_GROUP = 256
_F16_LANES = 2 * LANES
_BLOCK_NBYTES = LANES * BLOCK * 2 // 8
_SOURCE_NBYTES = {"TQ1_0": 54, "TQ2_0": 66}


class TernaryFormat(HeldFormat):
    """Tile: 16 float16 scales, 8 blocks of 128 B with two bits per weight."""

    name = "ternary"
    group_size = _GROUP
    exact_from = ("TQ1_0", "TQ2_0")

    def tile_nbytes(self, cols: int) -> int:
        return _F16_LANES + _GROUP // BLOCK * _BLOCK_NBYTES

    def source_row_nbytes(self, source_type: str, cols: int) -> int:
        return -(-cols // _GROUP) * _SOURCE_NBYTES[source_type]

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        blocks = raw.reshape(raw.shape[0], -1, _SOURCE_NBYTES[source_type])
        scale = finite_f16(blocks[:, :, -2:], f"{source_type} scale")
        source = blocks[:, :, :-2]
        codes = pair_codes(source) if source_type == "TQ2_0" else _base_three_codes(source)
        return assemble([f16_bytes(scale)], quads_to_lanes(join_bits(codes, 2)))

    def unpack_rows(self, tiles: Bytes) -> Floats:
        scale = f16_values(tiles[:, :, :_F16_LANES])
        quads = lanes_to_quads(code_blocks(tiles, _F16_LANES, _BLOCK_NBYTES))
        codes = split_bits(quads, 2).astype(np.float32) - 1
        return (codes.reshape(*scale.shape, _GROUP) * scale[..., None]).reshape(len(scale), -1)


def _base_three_codes(source: Bytes) -> Bytes:
    """TQ1_0 bytes [N, G, 52] -> codes [N, K].

    A byte is a fraction of 256 whose first digits in base three are weights a run of bytes apart:
    five from 32 bytes, five from 16, four from 4.
    """
    n, g, _ = source.shape
    parts = []
    for first, last, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = np.array([1, 3, 9, 27, 81][:digits], dtype=np.uint8)[:, None]
        rest = source[:, :, None, first:last] * powers  # modulo 256: the digits before fall off
        digit = (rest.astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8)
        parts.append(digit.reshape(n, g, -1))
    return np.concatenate(parts, axis=-1).reshape(n, -1)


FORMATS: tuple[HeldFormat, ...] = (TernaryFormat(),)

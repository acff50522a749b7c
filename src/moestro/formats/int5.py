"""5-bit integers with a float16 scale per 32, symmetric or with a minimum: GGUF's Q5_0 and Q5_1.

Codes of 32 channels are 320 B: the low four bits as in 4-bit formats, then 64 B of bit planes in
which bit j of byte ``c*4 + i`` is the fifth bit of channel 4j+i.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from moestro.formats.base import LANES
from moestro.formats.int4 import IntFormat, MinimumFormat, SymmetricFormat
from moestro.formats.tiles import (
    BLOCK,
    Bytes,
    assemble,
    f16_bytes,
    finite_f16,
    join_bits,
    pair_nibbles,
    quads_to_lanes,
    split_bits,
    split_nibbles,
)

_F16_LANES = 2 * LANES

# Whole levels so that weights which already lie on such a grid are found exactly, finer ones around
# the ends of the range.
_SYMMETRIC = (
    *(float(-n) for n in range(1, 16)),
    *(-15 - n / 4 for n in range(1, 9)),
    *(15 + n / 4 for n in range(1, 5)),
)
_SPREAD = (*(float(n) for n in range(1, 29)), *(29 + n / 2 for n in range(10)))


def join_five(codes: Bytes) -> Bytes:
    """uint8 0..31 [N, K] -> [N, C, 20]: sixteen bytes of nibbles, four of fifth bits."""
    low = pair_nibbles(codes & np.uint8(15))
    return np.concatenate([low, join_bits(codes >> np.uint8(4), 1)], axis=-1)


def split_five(quads: Bytes) -> Bytes:
    """Inverse of ``join_five``."""
    return split_nibbles(quads[:, :, :16]) | (split_bits(quads[:, :, 16:], 1) << np.uint8(4))


class _Int5(IntFormat):
    bits = 5
    block_nbytes = LANES * BLOCK * 5 // 8
    sources: ClassVar[dict[str, int]] = {"Q5_0": 22, "Q5_1": 24}

    def join_codes(self, codes: Bytes) -> Bytes:
        return join_five(codes)

    def split_codes(self, quads: Bytes) -> Bytes:
        return split_five(quads)

    def _source_codes(self, blocks: Bytes) -> Bytes:
        """[N, C, 4 bytes of fifth bits in channel order, 16 of nibble pairs] -> [B, C, 320]."""
        high = np.unpackbits(blocks[:, :, :4], axis=-1, bitorder="little")
        low = split_nibbles(blocks[:, :, 4:])
        codes = low | (high.reshape(low.shape) << np.uint8(4))
        return quads_to_lanes(self.join_codes(codes))


class Int5Format(_Int5, SymmetricFormat):
    """value = scale * (code - 16). Tile: 16 float16 scales, then the codes."""

    prefix = "int5"
    exact_from = ("Q5_0",)

    def levels(self, group: int) -> tuple[float, ...]:
        return _SYMMETRIC

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        blocks = raw.reshape(raw.shape[0], -1, 22)  # Q5_0: float16 d, fifth bits, nibble pairs
        scale = finite_f16(blocks[:, :, :2], "Q5_0 scale")
        return assemble([f16_bytes(scale)], self._source_codes(blocks[:, :, 2:]))


class Int5MinFormat(_Int5, MinimumFormat):
    """value = scale * code + minimum. Tile: 16 float16 scales, 16 float16 minima, the codes."""

    prefix = "int5m"
    spread = _SPREAD
    exact_from = ("Q5_1",)

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        blocks = raw.reshape(raw.shape[0], -1, 24)  # Q5_1: d, m, fifth bits, nibble pairs
        scale = finite_f16(blocks[:, :, :2], "Q5_1 scale")
        low = finite_f16(blocks[:, :, 2:4], "Q5_1 minimum")
        codes = self._source_codes(blocks[:, :, 4:])
        return assemble([f16_bytes(scale), f16_bytes(low)], codes)


FORMATS: tuple[IntFormat, ...] = (Int5Format(BLOCK), Int5MinFormat(BLOCK))

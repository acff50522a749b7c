"""GGUF's IQ types in our tiles, 256 channels a tile: weights as points of published grids.

iq2xxs, iq2xs, iq2s: eight neighbouring weights are one of 256, 512 or 1024 points, with a sign for
each. iq3xxs, iq3s: four are one of 256 or 512, with signs. iq1s, iq1m: eight are one of 2048, each
-1, 0 or 1, and all an eighth more or less. value = d * unit * (2 * s + 1) * (+-level), with a 4-bit
scale s per 32 or 16 channels and d (float16) shared by 256. Tiles keep the numbers of the points:
csrc/formats/lattice.h says where.

These formats hold what such files hold. Finding the points for other weights is a search of its own
that llama.cpp does, with a calibration file; here they are not packed from floats.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property

import numpy as np
import numpy.typing as npt

import moestro._core as core
from moestro.formats.base import LANES
from moestro.formats.held import HeldFormat
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
    lane_bytes,
    lane_values,
    lanes_to_quads,
    quads_to_lanes,
    split_bits,
)

Words = npt.NDArray[np.uint16]

_GROUP = 256
_F16_LANES = 2 * LANES
_LOW = np.uint8(15)
#: bytes of one high bit of 64 numbers
_PLANE = 8
#: ggml's ksigns: seven signs, and an eighth that makes the number of negative weights even
_SIGNS = np.array([n | (n.bit_count() % 2) << 7 for n in range(128)], dtype=np.uint8)


class LatticeFormat(HeldFormat):
    """Tile: 16 float16 d, nibbles of scales, 8 blocks of numbers, their high bits, and signs.

    In some formats masks of levels that are two less stand in the place of signs.
    """

    group_size = _GROUP
    #: weights per point, and bits of a point's number above eight
    row = 8
    high = 0
    #: scales per 32 channels
    steps = 1
    #: masks of lanes whose levels are two less, per 32 channels; 0: signs
    minus = 0
    unit: float
    levels: tuple[int, ...]
    source_nbytes: int

    @abstractmethod
    def source_parts(self, blocks: Bytes) -> tuple[Bytes, Words, Bytes]:
        """Source blocks [N, G, bytes] -> scales [N, subs], numbers [N, K / row], signs [N, K / 8].

        Bit i of a byte of signs belongs to channel i of eight. With ``minus`` masks there are 0 or
        1 [N, C * minus] instead.
        """

    def source_scale(self, blocks: Bytes) -> Bytes:
        """The bytes [N, G, 2] of the float16 d."""
        return blocks[:, :, :2]

    @property
    def header(self) -> int:
        return _F16_LANES + 4 * self.steps * LANES

    @property
    def block_nbytes(self) -> int:
        return self._numbers_nbytes + (2 * self.minus or BLOCK * LANES // 8)

    @property
    def _numbers_nbytes(self) -> int:
        return BLOCK // self.row * (LANES + 2 * self.high)

    @cached_property
    def points(self) -> Floats:
        """The grid, float32 [points, row]."""
        words = np.array(core.grid(self.name), dtype=np.uint16)[:, None]
        if self.row == 8:
            at = words >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
        else:
            at = words >> np.array([0, 8, 4, 12], dtype=np.uint16) & np.uint16(7)
        return np.array(self.levels, dtype=np.float32)[at]

    def tile_nbytes(self, cols: int) -> int:
        return self.header + _GROUP // BLOCK * self.block_nbytes

    def source_row_nbytes(self, source_type: str, cols: int) -> int:
        return -(-cols // _GROUP) * self.source_nbytes

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        n = raw.shape[0]
        blocks = raw.reshape(n, -1, self.source_nbytes)
        d = finite_f16(self.source_scale(blocks), f"{source_type} scale")
        scales, numbers, signs = self.source_parts(blocks)
        twos = scales.reshape(n, -1, 2)
        scales = twos[:, :, 0] | (twos[:, :, 1] << np.uint8(4))
        return assemble(
            [f16_bytes(d), lane_bytes(scales, 4 * self.steps)],
            np.concatenate([self._join_numbers(numbers), self._join_signs(signs)], axis=-1),
        )

    def unpack_rows(self, tiles: Bytes) -> Floats:
        d = f16_values(tiles[:, :, :_F16_LANES])
        both = lane_values(tiles[:, :, _F16_LANES : self.header], 4 * self.steps)
        scales = np.stack([both & _LOW, both >> np.uint8(4)], axis=-1)
        scales = scales.reshape(*d.shape, -1).astype(np.float32) * 2 + 1
        step = (d * np.float32(self.unit))[..., None] * scales
        blocks = code_blocks(tiles, self.header, self.block_nbytes)
        at = self._numbers_nbytes
        values = self.points[self._split_numbers(blocks[:, :, :at])].reshape(len(d), -1)
        signs = self._split_signs(blocks[:, :, at:])
        values = values - 2 * signs if self.minus else np.where(signs == 0, values, -values)
        return (values.reshape(*step.shape, -1) * step[..., None]).reshape(len(d), -1)

    def _join_numbers(self, numbers: Words) -> Bytes:
        """Numbers [N, K / row] -> the first part of blocks [B, C, bytes]."""
        n = numbers.shape[0]
        fours = numbers.reshape(n, -1, BLOCK // self.row)
        parts = [quads_to_lanes(fours.astype(np.uint8))]
        # [B, C, half, bit, odd, c, l / 2], as bits
        lanes = fours.reshape(n // LANES, LANES, fours.shape[1], -1, 2, 2)
        lanes = lanes.transpose(0, 2, 3, 5, 1, 4).reshape(n // LANES, fours.shape[1], -1, 1, 64)
        bits = (lanes >> np.arange(8, 8 + self.high, dtype=np.uint16)[:, None]) & np.uint16(1)
        planes = np.packbits(bits.astype(np.uint8), axis=-1, bitorder="little")
        shape = (*parts[0].shape[:2], _PLANE * self.high * (8 // self.row))
        return np.concatenate([*parts, planes.reshape(shape)], axis=-1)

    def _split_numbers(self, blocks: Bytes) -> Words:
        """Inverse of ``_join_numbers``."""
        b, c, _ = blocks.shape
        at = BLOCK // self.row * LANES
        numbers = lanes_to_quads(blocks[:, :, :at]).astype(np.uint16)
        planes = blocks[:, :, at:].reshape(b, c, 8 // self.row, self.high, _PLANE)
        bits = np.unpackbits(planes, axis=-1, bitorder="little").astype(np.uint16)
        lanes = bits.reshape(b, c, 8 // self.row, self.high, 2, LANES, 2).transpose(
            0, 5, 1, 2, 6, 4, 3
        )
        for plane in range(self.high):
            numbers |= lanes[..., plane].reshape(numbers.shape) << np.uint16(8 + plane)
        return numbers.reshape(b * LANES, -1)

    def _join_signs(self, signs: Bytes) -> Bytes:
        """Signs or masks of ``source_parts`` -> the last part of blocks [B, C, bytes]."""
        if not self.minus:
            return quads_to_lanes(join_bits(np.unpackbits(signs, axis=-1, bitorder="little"), 1))
        lanes = signs.reshape(len(signs) // LANES, LANES, -1, self.minus).transpose(0, 2, 3, 1)
        masks = np.packbits(lanes, axis=-1, bitorder="little")
        return masks.reshape(*masks.shape[:2], 2 * self.minus)

    def _split_signs(self, blocks: Bytes) -> Bytes:
        """Inverse of ``_join_signs`` -> 0 or 1 for each channel, [N, K]."""
        if not self.minus:
            return split_bits(lanes_to_quads(blocks), 1)
        b, c, _ = blocks.shape
        bits = np.unpackbits(blocks, axis=-1, bitorder="little")
        lanes = bits.reshape(b, c, self.minus, LANES).transpose(0, 3, 1, 2).reshape(b * LANES, -1)
        return np.repeat(lanes, BLOCK // self.minus, axis=-1)


def _nibbles(packed: Bytes) -> Bytes:
    """uint8 [N, G, S] -> [N, G * 2S], low nibbles first."""
    both = np.stack([packed & _LOW, packed >> np.uint8(4)], axis=-1)
    return both.reshape(packed.shape[0], -1)


def _scales_and_signs(packed: Bytes) -> tuple[Bytes, Bytes]:
    """uint8 [N, G, 32]: per 32 channels four times seven bits of signs, then a 4-bit scale."""
    words = np.ascontiguousarray(packed).view(np.uint32)[..., None]
    sevens = words >> np.arange(0, 28, 7, dtype=np.uint32) & np.uint32(127)
    scales = (words >> np.uint32(28)).astype(np.uint8)
    return scales.reshape(len(packed), -1), _SIGNS[sevens].reshape(len(packed), -1)


class Iq2Format(LatticeFormat):
    unit = 1 / 8
    levels = (8, 25, 43, 43)


class Iq2xxsFormat(Iq2Format):
    name = "iq2xxs"
    exact_from = ("IQ2_XXS",)
    source_nbytes = 66  # float16 d, 8 x (4 numbers, 4 x 7 signs and a scale)

    def source_parts(self, blocks: Bytes) -> tuple[Bytes, Words, Bytes]:
        n, g, _ = blocks.shape
        fours = np.ascontiguousarray(blocks[:, :, 2:]).reshape(n, g, 8, 8)
        scales, signs = _scales_and_signs(fours[..., 4:].reshape(n, g, 32))
        return scales, fours[..., :4].reshape(n, -1).astype(np.uint16), signs


class Iq2xsFormat(Iq2Format):
    name = "iq2xs"
    exact_from = ("IQ2_XS",)
    high = 1
    steps = 2
    source_nbytes = 74  # float16 d, 32 x (9 bits of number, 7 signs), 16 scales

    def source_parts(self, blocks: Bytes) -> tuple[Bytes, Words, Bytes]:
        n = blocks.shape[0]
        words = np.ascontiguousarray(blocks[:, :, 2:66]).view(np.uint16).reshape(n, -1)
        return _nibbles(blocks[:, :, 66:]), words & np.uint16(511), _SIGNS[words >> np.uint16(9)]


class Iq2sFormat(Iq2Format):
    name = "iq2s"
    exact_from = ("IQ2_S",)
    high = 2
    steps = 2
    source_nbytes = 82  # float16 d, 32 low bytes of numbers, 32 B signs, 32 x 2 bits, 16 scales

    def source_parts(self, blocks: Bytes) -> tuple[Bytes, Words, Bytes]:
        n = blocks.shape[0]
        pairs = blocks[:, :, 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8) & np.uint8(3)
        numbers = blocks[:, :, 2:34].reshape(n, -1) | (
            pairs.reshape(n, -1).astype(np.uint16) << np.uint16(8)
        )
        return _nibbles(blocks[:, :, 74:]), numbers, blocks[:, :, 34:66].reshape(n, -1)


class Iq3xxsFormat(LatticeFormat):
    name = "iq3xxs"
    exact_from = ("IQ3_XXS",)
    row = 4
    unit = 1 / 4
    levels = (4, 12, 20, 28, 36, 44, 52, 62)
    source_nbytes = 98  # float16 d, 64 numbers, 8 x (4 x 7 signs and a scale)

    def source_parts(self, blocks: Bytes) -> tuple[Bytes, Words, Bytes]:
        scales, signs = _scales_and_signs(blocks[:, :, 66:])
        return scales, blocks[:, :, 2:66].reshape(len(blocks), -1).astype(np.uint16), signs


class Iq3sFormat(LatticeFormat):
    name = "iq3s"
    exact_from = ("IQ3_S",)
    row = 4
    high = 1
    unit = 1.0
    levels = (1, 3, 5, 7, 9, 11, 13, 15)
    source_nbytes = 110  # float16 d, 64 low bytes of numbers, 64 ninth bits, 32 B signs, 8 scales

    def source_parts(self, blocks: Bytes) -> tuple[Bytes, Words, Bytes]:
        n = blocks.shape[0]
        ninth = np.unpackbits(blocks[:, :, 66:74], axis=-1, bitorder="little").reshape(n, -1)
        numbers = blocks[:, :, 2:66].reshape(n, -1) | (ninth.astype(np.uint16) << np.uint16(8))
        return _nibbles(blocks[:, :, 106:]), numbers, blocks[:, :, 74:106].reshape(n, -1)


class Iq1Format(LatticeFormat):
    unit = 1 / 8
    levels = (-7, 1, 9, 9)  # eight times -1, 0 and 1, and one more
    high = 3


class Iq1sFormat(Iq1Format):
    name = "iq1s"
    exact_from = ("IQ1_S",)
    minus = 1
    source_nbytes = 50  # float16 d, 32 low bytes of numbers, 8 x (4 x 3 bits, scale, minus)

    def source_parts(self, blocks: Bytes) -> tuple[Bytes, Words, Bytes]:
        n = blocks.shape[0]
        words = np.ascontiguousarray(blocks[:, :, 34:]).view(np.uint16)
        high = words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7)
        numbers = blocks[:, :, 2:34].reshape(n, -1) | (high.reshape(n, -1) << np.uint16(8))
        scales = (words >> np.uint16(12) & np.uint16(7)).astype(np.uint8)
        minus = (words >> np.uint16(15)).astype(np.uint8)
        return scales.reshape(n, -1), numbers, minus.reshape(n, -1)


class Iq1mFormat(Iq1Format):
    name = "iq1m"
    exact_from = ("IQ1_M",)
    steps = 2
    minus = 4
    #: 32 low bytes of numbers, 32 x (3 bits, minus), 4 x (4 scales of 3 bits, a quarter of d)
    source_nbytes = 56

    def source_scale(self, blocks: Bytes) -> Bytes:
        quarters = np.ascontiguousarray(blocks[:, :, 48:]).view(np.uint16) >> np.uint16(12)
        d = quarters[:, :, :1].copy()
        for at in (1, 2, 3):
            d |= quarters[:, :, at : at + 1] << np.uint16(4 * at)
        return d.view(np.uint8)

    def source_parts(self, blocks: Bytes) -> tuple[Bytes, Words, Bytes]:
        n = blocks.shape[0]
        fours = _nibbles(blocks[:, :, 32:48])
        high = (fours & np.uint8(7)).astype(np.uint16) << np.uint16(8)
        words = np.ascontiguousarray(blocks[:, :, 48:]).view(np.uint16)[..., None]
        scales = words >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7)
        numbers = blocks[:, :, :32].reshape(n, -1) | high
        return scales.astype(np.uint8).reshape(n, -1), numbers, fours >> np.uint8(3)


FORMATS: tuple[LatticeFormat, ...] = (
    Iq1sFormat(),
    Iq1mFormat(),
    Iq2xxsFormat(),
    Iq2xsFormat(),
    Iq2sFormat(),
    Iq3xxsFormat(),
    Iq3sFormat(),
)

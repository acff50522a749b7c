"""k2, k4, k5: GGUF's Q2_K, Q4_K and Q5_K in our tiles, 256 channels a tile.

value = d * scale * code - dmin * minimum. Each sub-block (16 channels in k2, else 32) has a small
unsigned scale and minimum; d and dmin (float16) are shared by 256.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from moestro.formats.base import LANES
from moestro.formats.int5 import join_five, split_five
from moestro.formats.search import (
    fit_affine,
    fit_shared_scale,
    keep_f32,
    reciprocal,
    round_codes,
    squared_error,
    weighted_sum,
)
from moestro.formats.tiles import (
    BLOCK,
    Bytes,
    Floats,
    TiledFormat,
    assemble,
    byte_codes,
    code_blocks,
    f16_bytes,
    f16_values,
    finite_f16,
    halves,
    join_bits,
    lane_bytes,
    lane_values,
    lanes_to_quads,
    pair_nibbles,
    quads_to_lanes,
    split_bits,
    split_nibbles,
)

_GROUP = 256
_F16_LANES = 2 * LANES
_TOP = 2 * _F16_LANES  # d and dmin
_PAIR_SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)[:, None]


class AffineFormat(TiledFormat):
    """Tile: 16 d, 16 dmin (float16), the scales and minima of each sub-block, 8 code blocks."""

    group_size = _GROUP
    pads_with_last = True
    #: channels that share a scale and a minimum; the largest code; the largest scale and minimum
    sub: int
    hi: int
    limit: int
    #: bytes of the scales and minima, and of a code block
    small_nbytes: int
    block_nbytes: int
    source_nbytes: int
    #: where in a source block d and dmin lie
    source_d: int
    #: trial spreads of a sub-block's range over the codes
    levels: tuple[float, ...]
    #: trial divisors of the largest scale (down to 1: where the extreme over the limit would vanish
    #: in float16, a coarser d still holds something)
    divisors: tuple[int, ...]

    @abstractmethod
    def join_small(self, sc: Bytes, m: Bytes) -> list[Bytes]:
        """Scales and minima [N, subs] -> header parts."""

    @abstractmethod
    def split_small(self, header: Bytes) -> tuple[Bytes, Bytes]:
        """Inverse of ``join_small``: bytes [B, G, small_nbytes] -> scales and minima [N, subs]."""

    @abstractmethod
    def join_codes(self, codes: Bytes) -> Bytes:
        """uint8 codes [N, K] -> [N, C, bytes per row of a block]."""

    @abstractmethod
    def split_codes(self, quads: Bytes) -> Bytes:
        """Inverse of ``join_codes``."""

    @abstractmethod
    def source_parts(self, blocks: Bytes) -> tuple[Bytes, Bytes, Bytes]:
        """Source blocks [N, G, bytes] -> scales and minima [N, subs], codes [N, K]."""

    def tile_nbytes(self, cols: int) -> int:
        return _TOP + self.small_nbytes + _GROUP // BLOCK * self.block_nbytes

    def source_row_nbytes(self, source_type: str, cols: int) -> int:
        return -(-cols // _GROUP) * self.source_nbytes

    def pack_rows(self, x: Tensor, importance: Tensor | None) -> Bytes:
        n, k = x.shape
        subs = x.view(n, k // self.sub, self.sub)
        w = None if importance is None else importance.view(k // self.sub, self.sub)
        scale, low = fit_affine(
            subs, w, hi=self.hi, levels=self.levels, rounding=keep_f32, nonpositive=True
        )
        # An error in a scale costs in proportion to its codes squared, one in a minimum to the
        # number of channels (their total weight).
        codes = ((subs - low) * reciprocal(scale)).round_().clamp_(0, self.hi)
        shape = (n, k // _GROUP, _GROUP // self.sub)
        scale, low = scale.view(shape), low.view(shape)
        scale_weight = weighted_sum(codes * codes, w).view(shape)
        low_weight = weighted_sum(torch.ones_like(codes), w).view(shape)
        d = fit_shared_scale(scale, scale_weight, lo=0, hi=self.limit, divisors=self.divisors)
        dmin = fit_shared_scale(-low, low_weight, lo=0, hi=self.limit, divisors=self.divisors)
        grid = [
            part.reshape(n, k // self.sub, 1)
            for part in (
                d.expand(shape),
                dmin.expand(shape),
                round_codes(scale, d, 0, self.limit),
                round_codes(-low, dmin, 0, self.limit),
            )
        ]
        sc, m, codes = self._best_neighbours(subs, w, *grid)
        return assemble(
            [
                f16_bytes(halves(d)),
                f16_bytes(halves(dmin)),
                *self.join_small(byte_codes(sc.squeeze(-1)), byte_codes(m.squeeze(-1))),
            ],
            quads_to_lanes(self.join_codes(byte_codes(codes).reshape(n, k))),
        )

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        blocks = raw.reshape(raw.shape[0], -1, self.source_nbytes)
        at = self.source_d
        d = finite_f16(blocks[:, :, at : at + 2], f"{source_type} scale")
        dmin = finite_f16(blocks[:, :, at + 2 : at + 4], f"{source_type} minimum scale")
        sc, m, codes = self.source_parts(blocks)
        return assemble(
            [f16_bytes(d), f16_bytes(dmin), *self.join_small(sc, m)],
            quads_to_lanes(self.join_codes(codes)),
        )

    def unpack_rows(self, tiles: Bytes) -> Floats:
        b, g, _ = tiles.shape
        n, subs = b * LANES, _GROUP // self.sub
        header = _TOP + self.small_nbytes
        d = f16_values(tiles[:, :, :_F16_LANES])[..., None]
        dmin = f16_values(tiles[:, :, _F16_LANES:_TOP])[..., None]
        sc, m = (part.reshape(n, g, subs) for part in self.split_small(tiles[:, :, _TOP:header]))
        quads = lanes_to_quads(code_blocks(tiles, header, self.block_nbytes))
        codes = self.split_codes(quads).astype(np.float32).reshape(n, g, subs, self.sub)
        values = codes * (d * sc)[..., None] - (dmin * m)[..., None]
        return values.reshape(n, -1)

    def _best_neighbours(
        self, x: Tensor, w: Tensor | None, d: Tensor, dmin: Tensor, sc: Tensor, m: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of the scale and minimum and their neighbours one step away, those of least true error.

        x [N, subs, sub], all others [N, subs, 1]; returns scales, minima and codes like x.
        """
        best = [torch.zeros_like(sc), torch.zeros_like(m), torch.zeros_like(x)]
        best_error = weighted_sum(x * x, w)
        for ds in (0, -1, 1):
            for dm in (0, -1, 1):
                trial_sc = (sc + ds).clamp_(0, self.limit)
                trial_m = (m + dm).clamp_(0, self.limit)
                scale, low = d * trial_sc, dmin * trial_m
                codes = ((x + low) * reciprocal(scale)).round_().clamp_(0, self.hi)
                error = squared_error(x, codes * scale - low, w)
                better = error < best_error
                trial = (trial_sc, trial_m, codes)
                best = [torch.where(better, new, old) for new, old in zip(trial, best, strict=True)]
                best_error = torch.where(better, error, best_error)
        return best[0], best[1], best[2]


class K4Format(AffineFormat):
    """4 bits; 8 x 16 scales, then 8 x 16 minima, 6 bits each."""

    name = "k4"
    exact_from = ("Q4_K",)
    sub = BLOCK
    hi = 15
    limit = 63
    small_nbytes = 2 * 8 * LANES
    block_nbytes = LANES * BLOCK // 2
    source_nbytes = 144  # float16 d, float16 dmin, 12 B of 6-bit pairs, 128 B of nibbles
    source_d = 0
    levels = tuple(12 + n / 3 for n in range(18))
    divisors = (*range(63, 44, -1), 32, 16, 8, 4, 2, 1)

    def join_small(self, sc: Bytes, m: Bytes) -> list[Bytes]:
        return [lane_bytes(sc, 8), lane_bytes(m, 8)]

    def split_small(self, header: Bytes) -> tuple[Bytes, Bytes]:
        half = 8 * LANES
        return lane_values(header[:, :, :half], 8), lane_values(header[:, :, half:], 8)

    def join_codes(self, codes: Bytes) -> Bytes:
        return pair_nibbles(codes)

    def split_codes(self, quads: Bytes) -> Bytes:
        return split_nibbles(quads)

    def source_parts(self, blocks: Bytes) -> tuple[Bytes, Bytes, Bytes]:
        n = blocks.shape[0]
        first, second, third = (blocks[:, :, i : i + 4] for i in (4, 8, 12))
        sc = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
        m = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
        return sc.reshape(n, -1), m.reshape(n, -1), self.source_codes(blocks)

    def source_codes(self, blocks: Bytes) -> Bytes:
        # Each 32 bytes hold two sub-blocks: the first in the low, the second in the high nibbles.
        packed = blocks[:, :, -128:].reshape(blocks.shape[0], -1, 4, 32)
        return np.stack([packed & 15, packed >> 4], axis=3).reshape(blocks.shape[0], -1)


class K5Format(K4Format):
    """5 bits; scales and minima as in k4."""

    name = "k5"
    exact_from = ("Q5_K",)
    hi = 31
    block_nbytes = LANES * BLOCK * 5 // 8
    source_nbytes = 176  # as Q4_K, with 32 B of fifth bits before the nibbles
    levels = tuple(27 + n / 2 for n in range(14))

    def join_codes(self, codes: Bytes) -> Bytes:
        return join_five(codes)

    def split_codes(self, quads: Bytes) -> Bytes:
        return split_five(quads)

    def source_codes(self, blocks: Bytes) -> Bytes:
        # Bit i of byte l is the fifth bit of channel 32 i + l.
        high = blocks[:, :, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]
        high = (high & np.uint8(1)).reshape(blocks.shape[0], -1)
        return super().source_codes(blocks) | (high << np.uint8(4))


class K2Format(AffineFormat):
    """2 bits; 16 x 16 bytes, the scale in the low and the minimum in the high four bits."""

    name = "k2"
    exact_from = ("Q2_K",)
    sub = 16
    hi = 3
    limit = 15
    small_nbytes = 16 * LANES
    block_nbytes = LANES * BLOCK // 4
    source_nbytes = 84  # 16 scales and minima, 64 B of 2-bit codes, float16 d, float16 dmin
    source_d = 80
    levels = tuple(1.5 + n / 8 for n in range(20))
    divisors = (*range(15, 7, -1), 4, 2, 1)

    def join_small(self, sc: Bytes, m: Bytes) -> list[Bytes]:
        return [lane_bytes(sc | (m << np.uint8(4)), 16)]

    def split_small(self, header: Bytes) -> tuple[Bytes, Bytes]:
        both = lane_values(header, 16)
        return both & np.uint8(15), both >> np.uint8(4)

    def join_codes(self, codes: Bytes) -> Bytes:
        return join_bits(codes, 2)

    def split_codes(self, quads: Bytes) -> Bytes:
        return split_bits(quads, 2)

    def source_parts(self, blocks: Bytes) -> tuple[Bytes, Bytes, Bytes]:
        n = blocks.shape[0]
        both = blocks[:, :, :16].reshape(n, -1)
        return both & np.uint8(15), both >> np.uint8(4), pair_codes(blocks[:, :, 16:80])


def pair_codes(packed: Bytes) -> Bytes:
    """Two-bit fields as ggml keeps them, uint8 [N, G, 64] -> [N, K].

    Of each 32 bytes, bits 2i..2i+1 of byte l are channel 32 i + l of 128.
    """
    n = packed.shape[0]
    quarters = packed.reshape(n, -1, 2, 1, 32) >> _PAIR_SHIFTS
    return (quarters & np.uint8(3)).reshape(n, -1)


FORMATS: tuple[AffineFormat, ...] = (K2Format(), K4Format(), K5Format())

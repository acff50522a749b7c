"""k3 and k6, GGUF's Q3_K and Q6_K in our tiles, 256 channels a tile.

value = d * scale * (code - zero). Each 16 channels have a small signed scale; d (float16) is shared
by 256.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from moestro.formats.base import LANES
from moestro.formats.kquant_affine import pair_codes
from moestro.formats.search import (
    fit_shared_scale,
    fit_symmetric,
    keep_f32,
    round_codes,
    squared_error,
    weighted_sum,
)
from moestro.formats.tiles import (
    BLOCK,
    Bytes,
    Floats,
    Halves,
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
_SUB = 16
_SUBS = _GROUP // _SUB
_F16_LANES = 2 * LANES
_PAIR = np.uint8(3)


class SymmetricFormat(TiledFormat):
    """Tile: 16 float16 d, the scales of 16 sub-blocks, 8 code blocks."""

    group_size = _GROUP
    #: codes are 0 .. 2 * zero - 1
    zero: int
    #: scales are -limit .. limit - 1
    limit: int
    #: bytes of the scales, of a code block and of a source block
    small_nbytes: int
    block_nbytes: int
    source_nbytes: int
    #: where a trial puts a sub-block's extreme
    levels: tuple[float, ...]
    #: trial divisors of the largest scale (down to 1: where the extreme over the limit would vanish
    #: in float16, a coarser d still holds something)
    divisors: tuple[int, ...]

    @abstractmethod
    def join_small(self, sc: Bytes) -> Bytes:
        """Scales [N, subs] (signed bytes seen as uint8) -> their part of the header."""

    @abstractmethod
    def split_small(self, header: Bytes) -> Bytes:
        """Inverse of ``join_small``: bytes [B, G, small_nbytes] -> [N, subs]."""

    @abstractmethod
    def join_codes(self, codes: Bytes) -> Bytes:
        """uint8 codes [N, K] -> [N, C, bytes per row of a block]."""

    @abstractmethod
    def split_codes(self, quads: Bytes) -> Bytes:
        """Inverse of ``join_codes``."""

    @abstractmethod
    def source_parts(self, blocks: Bytes) -> tuple[Bytes, Bytes]:
        """Source blocks [N, G, bytes], d last -> scales [N, subs] and codes [N, K]."""

    def tile_nbytes(self, cols: int) -> int:
        return _F16_LANES + self.small_nbytes + _GROUP // BLOCK * self.block_nbytes

    def source_row_nbytes(self, source_type: str, cols: int) -> int:
        return -(-cols // _GROUP) * self.source_nbytes

    def pack_rows(self, x: Tensor, importance: Tensor | None) -> Bytes:
        n, k = x.shape
        lo, hi = -self.zero, self.zero - 1
        subs = x.view(n, k // _SUB, _SUB)
        w = None if importance is None else importance.view(k // _SUB, _SUB)
        scale = fit_symmetric(subs, w, lo=lo, hi=hi, levels=self.levels, rounding=keep_f32)
        codes = round_codes(subs, scale, lo, hi)
        shape = (n, k // _GROUP, _SUBS)
        scale = scale.view(shape)
        scale_weight = weighted_sum(codes * codes, w).view(shape)
        low, high = -self.limit, self.limit - 1
        d = fit_shared_scale(scale, scale_weight, lo=low, hi=high, divisors=self.divisors)
        sc = round_codes(scale, d, low, high).view(n, -1, 1)
        sc, codes = self._best_neighbours(subs, w, d.expand(shape).reshape(n, -1, 1), sc)
        return self._tiles(
            halves(d),
            sc.squeeze(-1).to(torch.int8).numpy().view(np.uint8),
            byte_codes(codes.add_(self.zero)).reshape(n, k),
        )

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        blocks = raw.reshape(raw.shape[0], -1, self.source_nbytes)
        return self._tiles(
            finite_f16(blocks[:, :, -2:], f"{source_type} scale"), *self.source_parts(blocks)
        )

    def unpack_rows(self, tiles: Bytes) -> Floats:
        b, g, _ = tiles.shape
        n = b * LANES
        header = _F16_LANES + self.small_nbytes
        d = f16_values(tiles[:, :, :_F16_LANES])[..., None]
        sc = self.split_small(tiles[:, :, _F16_LANES:header]).view(np.int8)
        quads = lanes_to_quads(code_blocks(tiles, header, self.block_nbytes))
        codes = self.split_codes(quads).astype(np.float32) - np.float32(self.zero)
        scale = d * sc.reshape(n, g, _SUBS)
        return (codes.reshape(n, g, _SUBS, _SUB) * scale[..., None]).reshape(n, -1)

    def _tiles(self, d: Halves, sc: Bytes, codes: Bytes) -> Bytes:
        """d float16 [N, G], scales uint8 [N, G * 16] (as bits), codes uint8 [N, K] -> tiles."""
        return assemble([f16_bytes(d), self.join_small(sc)], quads_to_lanes(self.join_codes(codes)))

    def _best_neighbours(
        self, x: Tensor, w: Tensor | None, d: Tensor, sc: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of the scale and its two neighbours the one of least true error, with its codes."""
        best_sc, best_codes = torch.zeros_like(sc), torch.zeros_like(x)
        best_error = weighted_sum(x * x, w)
        for step in (0, -1, 1):
            trial = (sc + step).clamp_(-self.limit, self.limit - 1)
            codes = round_codes(x, d * trial, -self.zero, self.zero - 1)
            error = squared_error(x, codes * (d * trial), w)
            better = error < best_error
            best_sc = torch.where(better, trial, best_sc)
            best_codes = torch.where(better, codes, best_codes)
            best_error = torch.where(better, error, best_error)
        return best_sc, best_codes


class K6Format(SymmetricFormat):
    """6 bits: 256 B of low nibbles and 128 B of high pairs a block; 16 x 16 signed 8-bit scales."""

    name = "k6"
    exact_from = ("Q6_K",)
    zero = 32
    limit = 128
    small_nbytes = _SUBS * LANES
    block_nbytes = LANES * BLOCK * 6 // 8
    source_nbytes = 210  # 128 B low nibbles, 64 B high bits, 16 signed scales, float16 d
    levels = (*(-24 - n / 2 for n in range(20)), 31.5, 32.0, 32.5, 33.0)
    divisors = (*range(-128, -104), 127, 126, 125, 124, *(-(1 << n) for n in range(7)))

    def join_small(self, sc: Bytes) -> Bytes:
        return lane_bytes(sc, _SUBS)

    def split_small(self, header: Bytes) -> Bytes:
        return lane_values(header, _SUBS)

    def join_codes(self, codes: Bytes) -> Bytes:
        low, high = pair_nibbles(codes & np.uint8(15)), join_bits(codes >> np.uint8(4), 2)
        return np.concatenate([low, high], axis=-1)

    def split_codes(self, quads: Bytes) -> Bytes:
        return split_nibbles(quads[:, :, :16]) | (split_bits(quads[:, :, 16:], 2) << np.uint8(4))

    def source_parts(self, blocks: Bytes) -> tuple[Bytes, Bytes]:
        n = blocks.shape[0]
        # Per 128 channels: 64 bytes of nibbles (low: channels 0..63, high: 64..127) and 32 bytes
        # whose bit pairs are channels l, l+32, l+64, l+96.
        both = blocks[:, :, :128].reshape(n, -1, 2, 64)
        low: Bytes = np.concatenate([both & np.uint8(15), both >> np.uint8(4)], axis=-1)
        codes = low.reshape(n, -1) | (pair_codes(blocks[:, :, 128:192]) << np.uint8(4))
        return blocks[:, :, 192:208].reshape(n, -1), codes


class K3Format(SymmetricFormat):
    """3 bits: 128 B of low pairs and 64 B of third bits a block; 6-bit scales plus 32.

    Scales: 8 x 16 bytes with the low four bits of two sub-blocks each, 4 x 16 bytes with the upper
    two bits of four.
    """

    name = "k3"
    exact_from = ("Q3_K",)
    zero = 4
    limit = 32
    small_nbytes = _SUBS * LANES * 6 // 8
    block_nbytes = LANES * BLOCK * 3 // 8
    source_nbytes = 110  # 32 B third bits, 64 B of 2-bit codes, 12 B of 6-bit scales, float16 d
    levels = (*(-2.5 - n / 8 for n in range(20)), 3.0, 3.25, 3.5, 3.75)
    divisors = (*range(-32, -23), 31, 30, 29, 28, *(-(1 << n) for n in range(5)))

    def join_small(self, sc: Bytes) -> Bytes:
        biased = sc + np.uint8(32)
        twos = (biased & np.uint8(15)).reshape(biased.shape[0], -1, 2)
        low = twos[:, :, 0] | (twos[:, :, 1] << np.uint8(4))
        fours = (biased >> np.uint8(4)).reshape(biased.shape[0], -1, 4)
        high = fours[:, :, 0].copy()
        for at in (1, 2, 3):
            high |= fours[:, :, at] << np.uint8(2 * at)
        parts = [lane_bytes(low, _SUBS // 2), lane_bytes(high, _SUBS // 4)]
        return np.concatenate(parts, axis=-1)

    def split_small(self, header: Bytes) -> Bytes:
        at = _SUBS // 2 * LANES
        low, high = lane_values(header[:, :, :at], 8), lane_values(header[:, :, at:], 4)
        low = np.stack([low & np.uint8(15), low >> np.uint8(4)], axis=-1)
        high = (high[:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & _PAIR
        biased = low.reshape(low.shape[0], -1) | (high.reshape(low.shape[0], -1) << np.uint8(4))
        return biased - np.uint8(32)

    def join_codes(self, codes: Bytes) -> Bytes:
        low, high = join_bits(codes & _PAIR, 2), join_bits(codes >> np.uint8(2), 1)
        return np.concatenate([low, high], axis=-1)

    def split_codes(self, quads: Bytes) -> Bytes:
        return split_bits(quads[:, :, :8], 2) | (split_bits(quads[:, :, 8:], 1) << np.uint8(2))

    def source_parts(self, blocks: Bytes) -> tuple[Bytes, Bytes]:
        n = blocks.shape[0]
        # Bit i of byte l is the third bit of channel 32 i + l.
        high = blocks[:, :, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]
        high = (high & np.uint8(1)).reshape(n, -1)
        codes = pair_codes(blocks[:, :, 32:96]) | (high << np.uint8(2))
        # Scales 0..7 and 8..15 in the low and high nibbles of 8 bytes, their upper bits in 4 more.
        low, high = blocks[:, :, 96:104], blocks[:, :, None, 104:108]
        low = np.concatenate([low & np.uint8(15), low >> np.uint8(4)], axis=-1)
        high = (high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & _PAIR
        biased = low.reshape(n, -1) | (high.reshape(n, -1) << np.uint8(4))
        return biased - np.uint8(32), codes


FORMATS: tuple[SymmetricFormat, ...] = (K3Format(), K6Format())

"""k6, GGUF's Q6_K in our tiles: value = d * scale * (code - 32), 256 channels a tile.

Each 16 channels have a signed 8-bit scale; d (float16) is shared by 256.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moestro.formats.base import LANES
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
    lane_bytes,
    lane_values,
    lanes_to_quads,
    pair_nibbles,
    quads_to_lanes,
    split_nibbles,
)

_GROUP = 256
_SUB = 16
_SUBS = _GROUP // _SUB
_F16_LANES = 2 * LANES
_HEADER = _F16_LANES + _SUBS * LANES
_LOW_NBYTES = LANES * BLOCK // 2
_HIGH_NBYTES = LANES * BLOCK // 4
_BLOCK_NBYTES = _LOW_NBYTES + _HIGH_NBYTES
_SOURCE_NBYTES = 210  # Q6_K: 128 B low nibbles, 64 B high bits, 16 signed scales, float16 d
_PAIR = np.uint8(3)
_SHIFTS = (np.uint8(0), np.uint8(2), np.uint8(4), np.uint8(6))
_LEVELS = (*(-24 - n / 2 for n in range(20)), 31.5, 32.0, 32.5, 33.0)
# Down to 1: where extreme / 128 would vanish in float16, a coarser d still holds something.
_DIVISORS = (*range(-128, -104), 127, 126, 125, 124, *(-(1 << n) for n in range(7)))


class K6Format(TiledFormat):
    """Tile: 16 float16 d, 16 x 16 signed scales, 8 blocks of 256 B low and 128 B high bits."""

    name = "k6"
    group_size = _GROUP
    exact_from = ("Q6_K",)

    def tile_nbytes(self, cols: int) -> int:
        return _HEADER + _GROUP // BLOCK * _BLOCK_NBYTES

    def source_row_nbytes(self, source_type: str, cols: int) -> int:
        return -(-cols // _GROUP) * _SOURCE_NBYTES

    def pack_rows(self, x: Tensor, importance: Tensor | None) -> Bytes:
        n, k = x.shape
        subs = x.view(n, k // _SUB, _SUB)
        w = None if importance is None else importance.view(k // _SUB, _SUB)
        scale = fit_symmetric(subs, w, lo=-32, hi=31, levels=_LEVELS, rounding=keep_f32)
        codes = round_codes(subs, scale, -32, 31)
        shape = (n, k // _GROUP, _SUBS)
        scale = scale.view(shape)
        scale_weight = weighted_sum(codes * codes, w).view(shape)
        d = fit_shared_scale(scale, scale_weight, lo=-128, hi=127, divisors=_DIVISORS)
        sc = round_codes(scale, d, -128, 127).view(n, -1, 1)
        sc, codes = _best_neighbours(subs, w, d.expand(shape).reshape(n, -1, 1), sc)
        return _tiles(
            halves(d),
            sc.squeeze(-1).to(torch.int8).numpy().view(np.uint8),
            byte_codes(codes.add_(32)).reshape(n, k),
        )

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        n = raw.shape[0]
        blocks = raw.reshape(n, -1, _SOURCE_NBYTES)
        d = finite_f16(blocks[:, :, 208:], "Q6_K scale")
        # Per 128 channels: 64 bytes of nibbles (low: channels 0..63, high: 64..127) and 32 bytes
        # whose bit pairs are channels l, l+32, l+64, l+96.
        low = blocks[:, :, :128].reshape(n, -1, 2, 64)
        low = np.concatenate([low & np.uint8(15), low >> np.uint8(4)], axis=-1)
        high = blocks[:, :, 128:192].reshape(n, -1, 2, 32)
        high = np.concatenate([(high >> shift) & _PAIR for shift in _SHIFTS], axis=-1)
        codes = low | (high << np.uint8(4))
        return _tiles(d, blocks[:, :, 192:208].reshape(n, -1), codes.reshape(n, -1))

    def unpack_rows(self, tiles: Bytes) -> Floats:
        b, g, _ = tiles.shape
        n = b * LANES
        d = f16_values(tiles[:, :, :_F16_LANES])[..., None]
        sc = lane_values(tiles[:, :, _F16_LANES:_HEADER], _SUBS).view(np.int8)
        blocks = code_blocks(tiles, _HEADER, _BLOCK_NBYTES)
        low = split_nibbles(lanes_to_quads(blocks[:, :, :_LOW_NBYTES]))
        high = _split_high(lanes_to_quads(blocks[:, :, _LOW_NBYTES:]))
        codes = (low | (high << 4)).astype(np.float32) - np.float32(32)
        scale = d * sc.reshape(n, g, _SUBS)
        return (codes.reshape(n, g, _SUBS, _SUB) * scale[..., None]).reshape(n, -1)


def _tiles(d: Halves, sc: Bytes, codes: Bytes) -> Bytes:
    """d float16 [N, G], scales uint8 [N, G * 16] (as bits), codes uint8 0..63 [N, K] -> tiles."""
    low = quads_to_lanes(pair_nibbles(codes & np.uint8(15)))
    high = quads_to_lanes(_join_high(codes >> np.uint8(4)))
    return assemble([f16_bytes(d), lane_bytes(sc, _SUBS)], np.concatenate([low, high], axis=-1))


def _join_high(high: Bytes) -> Bytes:
    """2-bit values [N, K] -> [N, C, 8]: byte h*4+i holds channels 16h + 4jj + i, jj = 0..3."""
    quads = high.reshape(high.shape[0], -1, 2, 4, 4)
    joined = quads[:, :, :, 0] | (quads[:, :, :, 1] << _SHIFTS[1])
    joined = joined | (quads[:, :, :, 2] << _SHIFTS[2]) | (quads[:, :, :, 3] << _SHIFTS[3])
    return joined.reshape(high.shape[0], -1, 8)


def _split_high(joined: Bytes) -> Bytes:
    """Inverse of ``_join_high``: [N, C, 8] -> [N, K]."""
    n, c, _ = joined.shape
    parts = joined.reshape(n, c, 2, 1, 4)
    quads = [(parts >> shift) & _PAIR for shift in _SHIFTS]
    return np.concatenate(quads, axis=3).reshape(n, -1)


def _best_neighbours(x: Tensor, w: Tensor | None, d: Tensor, sc: Tensor) -> tuple[Tensor, Tensor]:
    """Of the scale and its two neighbours the one of least true error, with its codes."""
    best_sc, best_codes = torch.zeros_like(sc), torch.zeros_like(x)
    best_error = weighted_sum(x * x, w)
    for step in (0, -1, 1):
        trial = (sc + step).clamp_(-128, 127)
        codes = round_codes(x, d * trial, -32, 31)
        error = squared_error(x, codes * (d * trial), w)
        better = error < best_error
        best_sc = torch.where(better, trial, best_sc)
        best_codes = torch.where(better, codes, best_codes)
        best_error = torch.where(better, error, best_error)
    return best_sc, best_codes


FORMATS = (K6Format(),)

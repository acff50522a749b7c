"""k4, GGUF's Q4_K in our tiles: value = d * scale * code - dmin * minimum, 256 channels a tile.

Each 32 channels have a 6-bit scale and a 6-bit minimum; d and dmin (float16) are shared by 256.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moestro.formats.base import LANES
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
    lane_bytes,
    lane_values,
    lanes_to_quads,
    pair_nibbles,
    quads_to_lanes,
    split_nibbles,
)

_GROUP = 256
_SUBS = _GROUP // BLOCK
_F16_LANES = 2 * LANES
_SUB_LANES = _SUBS * LANES
_HEADER = 2 * _F16_LANES + 2 * _SUB_LANES
_BLOCK_NBYTES = LANES * BLOCK // 2
_SOURCE_NBYTES = 144  # Q4_K: float16 d, float16 dmin, 12 B of 6-bit pairs, 128 B of nibbles
_LEVELS = tuple(12 + n / 3 for n in range(18))
# Down to 1: where extreme / 63 would vanish in float16, a coarser d still holds something.
_DIVISORS = (*range(63, 44, -1), 32, 16, 8, 4, 2, 1)


class K4Format(TiledFormat):
    """Tile: 16 d, 16 dmin (float16), 8 x 16 scales, 8 x 16 minima, 8 blocks of 32 channels."""

    name = "k4"
    group_size = _GROUP
    exact_from = ("Q4_K",)
    pads_with_last = True

    def tile_nbytes(self, cols: int) -> int:
        return _HEADER + _SUBS * _BLOCK_NBYTES

    def source_row_nbytes(self, source_type: str, cols: int) -> int:
        return -(-cols // _GROUP) * _SOURCE_NBYTES

    def pack_rows(self, x: Tensor, importance: Tensor | None) -> Bytes:
        n, k = x.shape
        subs = x.view(n, k // BLOCK, BLOCK)
        w = None if importance is None else importance.view(k // BLOCK, BLOCK)
        scale, low = fit_affine(subs, w, hi=15, levels=_LEVELS, rounding=keep_f32, nonpositive=True)
        # An error in a scale costs in proportion to its codes squared, one in a minimum to the
        # number of channels (their total weight).
        codes = ((subs - low) * reciprocal(scale)).round_().clamp_(0, 15)
        shape = (n, k // _GROUP, _SUBS)
        scale, low = scale.view(shape), low.view(shape)
        scale_weight = weighted_sum(codes * codes, w).view(shape)
        low_weight = weighted_sum(torch.ones_like(codes), w).view(shape)
        d = fit_shared_scale(scale, scale_weight, lo=0, hi=63, divisors=_DIVISORS)
        dmin = fit_shared_scale(-low, low_weight, lo=0, hi=63, divisors=_DIVISORS)
        grid = [
            part.reshape(n, k // BLOCK, 1)
            for part in (
                d.expand(shape),
                dmin.expand(shape),
                round_codes(scale, d, 0, 63),
                round_codes(-low, dmin, 0, 63),
            )
        ]
        sc, m, codes = _best_neighbours(subs, w, *grid)
        return assemble(
            [
                f16_bytes(halves(d)),
                f16_bytes(halves(dmin)),
                lane_bytes(byte_codes(sc.squeeze(-1)), _SUBS),
                lane_bytes(byte_codes(m.squeeze(-1)), _SUBS),
            ],
            quads_to_lanes(pair_nibbles(byte_codes(codes).reshape(n, k))),
        )

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        n = raw.shape[0]
        blocks = raw.reshape(n, -1, _SOURCE_NBYTES)
        d = finite_f16(blocks[:, :, 0:2], "Q4_K scale")
        dmin = finite_f16(blocks[:, :, 2:4], "Q4_K minimum scale")
        first, second, third = (blocks[:, :, i : i + 4] for i in (4, 8, 12))
        sc = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
        m = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
        # Each 32 bytes hold two sub-blocks: the first in the low, the second in the high nibbles.
        packed = blocks[:, :, 16:].reshape(n, -1, 4, 32)
        codes = np.stack([packed & 15, packed >> 4], axis=3)
        return assemble(
            [
                f16_bytes(d),
                f16_bytes(dmin),
                lane_bytes(sc.reshape(n, -1), _SUBS),
                lane_bytes(m.reshape(n, -1), _SUBS),
            ],
            quads_to_lanes(pair_nibbles(codes.reshape(n, -1))),
        )

    def unpack_rows(self, tiles: Bytes) -> Floats:
        b, g, _ = tiles.shape
        n = b * LANES
        at = 2 * _F16_LANES
        d = f16_values(tiles[:, :, :_F16_LANES])[..., None]
        dmin = f16_values(tiles[:, :, _F16_LANES:at])[..., None]
        sc = lane_values(tiles[:, :, at : at + _SUB_LANES], _SUBS).reshape(n, g, _SUBS)
        m = lane_values(tiles[:, :, at + _SUB_LANES : _HEADER], _SUBS).reshape(n, g, _SUBS)
        paired = lanes_to_quads(code_blocks(tiles, _HEADER, _BLOCK_NBYTES))
        codes = split_nibbles(paired).astype(np.float32).reshape(n, g, _SUBS, BLOCK)
        values = codes * (d * sc)[..., None] - (dmin * m)[..., None]
        return values.reshape(n, -1)


def _best_neighbours(
    x: Tensor, w: Tensor | None, d: Tensor, dmin: Tensor, sc: Tensor, m: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the scale and minimum and their neighbours one step away, those of least true error.

    x [N, C, 32], all others [N, C, 1]; returns scales, minima and codes [N, C, 32].
    """
    best = [torch.zeros_like(sc), torch.zeros_like(m), torch.zeros_like(x)]
    best_error = weighted_sum(x * x, w)
    for ds in (0, -1, 1):
        for dm in (0, -1, 1):
            trial_sc, trial_m = (sc + ds).clamp_(0, 63), (m + dm).clamp_(0, 63)
            scale, low = d * trial_sc, dmin * trial_m
            codes = ((x + low) * reciprocal(scale)).round_().clamp_(0, 15)
            error = squared_error(x, codes * scale - low, w)
            better = error < best_error
            trial = (trial_sc, trial_m, codes)
            best = [torch.where(better, new, old) for new, old in zip(trial, best, strict=True)]
            best_error = torch.where(better, error, best_error)
    return best[0], best[1], best[2]


FORMATS = (K4Format(),)

"""4-bit indices into sixteen whole numbers, with a scale per 32 channels.

lut4nl-g32 and k4nl: ggml's uneven table (IQ4_NL and IQ4_XS), finer around zero, with a float16
scale, or a signed 6-bit scale and one float16 per 256. mxfp4: the 4-bit floats of the Open Compute
Project's MX specification with a shared power of two.
Indices lie as in the 4-bit integer formats: 256 B per 32 channels.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moestro.core.errors import CheckpointError, UnsupportedFormat
from moestro.formats.base import LANES
from moestro.formats.search import (
    Table,
    fit_shared_scale,
    fit_table,
    keep_f32,
    round_codes,
    squared_error,
    weighted_sum,
)
from moestro.formats.tiles import (
    BLOCK,
    Bytes,
    Floats,
    Scales,
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

_F16_LANES = 2 * LANES
_BLOCK_NBYTES = LANES * BLOCK // 2
_GROUP = 256
_SUBS = _GROUP // BLOCK

#: ggml's kvalues_iq4nl
_NONLINEAR = Table((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
#: twice the values of e2m1, sign in the top bit
_E2M1 = Table((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))

# Where the value of largest magnitude goes: at and around both ends, and inside.
_LEVELS = (
    *(-127.0 - 3 * n for n in range(-9, 7)),
    *(113.0 + 3 * n for n in range(-7, 6)),
    *(float(-value) for value in (65, 83)),
)
# The largest exponent whose every value (up to 12 * 2^(e - 128)) is a finite float32.
_LARGEST_EXPONENT = 252
# Of a group's largest magnitude, below 2^top: further up the exponent above would be exceeded,
# further down a group is stored as zero.
_LARGEST_TOP = 126
_SMALLEST_TOP = -100
_DIVISORS = (*range(-32, -23), 31, 30, 29, 28, *(-(1 << n) for n in range(5)))


def _lanes(indices: Bytes) -> Bytes:
    """uint8 indices [N, K] -> [B, C, 256]."""
    return quads_to_lanes(pair_nibbles(indices))


def _indices(tiles: Bytes, header: int) -> Bytes:
    """Tiles [B, G, tile] -> uint8 [N, K]."""
    return split_nibbles(lanes_to_quads(code_blocks(tiles, header, _BLOCK_NBYTES)))


class Lut4NlFormat(TiledFormat):
    """value = scale * table[index]. Tile: 16 float16 scales, then the indices."""

    name = "lut4nl-g32"
    group_size = BLOCK
    exact_from = ("IQ4_NL",)
    pads_with_last = True

    def tile_nbytes(self, cols: int) -> int:
        return _F16_LANES + _BLOCK_NBYTES

    def source_row_nbytes(self, source_type: str, cols: int) -> int:
        return -(-cols // BLOCK) * 18

    def pack_rows(self, x: Tensor, importance: Tensor | None) -> Bytes:
        n, k = x.shape
        grouped = x.view(n, k // BLOCK, BLOCK)
        w = None if importance is None else importance.view(k // BLOCK, BLOCK)
        scale = fit_table(grouped, w, _NONLINEAR, levels=_LEVELS)
        indices = byte_codes(_NONLINEAR.indices(grouped, scale)).reshape(n, k)
        return assemble([f16_bytes(halves(scale))], _lanes(indices))

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        blocks = raw.reshape(raw.shape[0], -1, 18)  # IQ4_NL: float16 d, 16 bytes of nibble pairs
        scale = finite_f16(blocks[:, :, :2], "IQ4_NL scale")
        return assemble([f16_bytes(scale)], quads_to_lanes(blocks[:, :, 2:]))

    def unpack_rows(self, tiles: Bytes) -> Floats:
        scale = f16_values(tiles[:, :, :_F16_LANES])
        values = _NONLINEAR.array[_indices(tiles, _F16_LANES)]
        return (values.reshape(*scale.shape, BLOCK) * scale[..., None]).reshape(len(scale), -1)


class Mxfp4Format(TiledFormat):
    """value = 2^(e - 128) * table[index]. Tile: 16 exponents e (bytes), then the indices.

    As in the MX specification, where the table holds halves and the exponent counts from 127.
    """

    name = "mxfp4"
    group_size = BLOCK
    exact_from = ("MXFP4",)
    code_max = 15
    code_middle = 0

    def tile_nbytes(self, cols: int) -> int:
        return LANES + _BLOCK_NBYTES

    def source_row_nbytes(self, source_type: str, cols: int) -> int:
        return -(-cols // BLOCK) * 17

    def pack_rows(self, x: Tensor, importance: Tensor | None) -> Bytes:
        n, k = x.shape
        grouped = x.view(n, k // BLOCK, BLOCK)
        w = None if importance is None else importance.view(k // BLOCK, BLOCK)
        magnitude = grouped.abs().amax(-1, keepdim=True)
        # magnitude < 2^top, brought to about 1 so that squares stay within float32. The largest
        # level is 12: candidates that leave room, that may clip, and that do.
        top = torch.frexp(magnitude)[1].clamp_(_SMALLEST_TOP, _LARGEST_TOP)
        near_one = grouped * _power(128 - top)
        best = torch.zeros_like(top)
        best_error = weighted_sum(near_one * near_one, w)
        for step in (4, 3, 2):
            scale = torch.full_like(magnitude, 2.0**-step)
            error = squared_error(near_one, _E2M1.nearest(near_one, scale) * scale, w)
            better = (error < best_error) & (magnitude > 2.0**_SMALLEST_TOP)
            best = torch.where(better, top - step + 128, best)
            best_error = torch.where(better, error, best_error)
        scale = torch.where(best > 0, _power(best - top), torch.zeros_like(magnitude))
        indices = byte_codes(_E2M1.indices(near_one, scale)).reshape(n, k)
        return assemble([lane_bytes(byte_codes(best.squeeze(-1)), 1)], _lanes(indices))

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        blocks = raw.reshape(raw.shape[0], -1, 17)  # MXFP4: exponent, 16 bytes of nibble pairs
        return self.tiles_of(blocks[:, :, 0], blocks[:, :, 1:])

    def stored_scales(self, scales: Floats) -> Scales:
        """2^(e - 127) -> e."""
        if not np.isfinite(scales).all():
            raise CheckpointError("some scales are not finite")
        mantissa, exponent = np.frexp(scales)
        uneven = (mantissa != 0.5) | (exponent < -126)
        if uneven.any():
            raise UnsupportedFormat(
                f"{int(uneven.sum())} of {scales.size} scales (such as {scales[uneven][0]:.6g}) "
                f"are not powers of two, which format {self.name} has for scales"
            )
        return (exponent + 126).astype(np.uint8)

    def code_rows(self, codes: Bytes, scale: Scales, zeros: Bytes | None) -> Bytes:
        return self.tiles_of(scale, pair_nibbles(codes))

    def tiles_of(self, exponents: Bytes, pairs: Bytes) -> Bytes:
        """Exponents uint8 [N, G] and indices [N, G, 16] (channel k low, k + 16 high) -> tiles."""
        bad = int(np.count_nonzero(exponents > _LARGEST_EXPONENT))
        if bad:
            raise CheckpointError(f"MXFP4 scale: {bad} of {exponents.size} weights are not finite")
        return assemble([lane_bytes(exponents, 1)], quads_to_lanes(pairs))

    def unpack_rows(self, tiles: Bytes) -> Floats:
        exponent = lane_values(tiles[:, :, :LANES], 1).astype(np.int32) - 128
        values = _E2M1.array[_indices(tiles, LANES)].reshape(*exponent.shape, BLOCK)
        return np.ldexp(values, exponent[..., None]).reshape(len(exponent), -1)


class K4NlFormat(TiledFormat):
    """value = d * scale * table[index]. Tile: 16 float16 d, 8 x 16 signed scales, the indices."""

    name = "k4nl"
    group_size = _GROUP
    exact_from = ("IQ4_XS",)
    pads_with_last = True
    header = _F16_LANES + _SUBS * LANES

    def tile_nbytes(self, cols: int) -> int:
        return self.header + _SUBS * _BLOCK_NBYTES

    def source_row_nbytes(self, source_type: str, cols: int) -> int:
        return -(-cols // _GROUP) * 136

    def pack_rows(self, x: Tensor, importance: Tensor | None) -> Bytes:
        n, k = x.shape
        subs = x.view(n, k // BLOCK, BLOCK)
        w = None if importance is None else importance.view(k // BLOCK, BLOCK)
        scale = fit_table(subs, w, _NONLINEAR, levels=_LEVELS, rounding=keep_f32)
        values = _NONLINEAR.nearest(subs, scale)
        shape = (n, k // _GROUP, _SUBS)
        scale = scale.view(shape)
        scale_weight = weighted_sum(values * values, w).view(shape)
        d = fit_shared_scale(scale, scale_weight, lo=-32, hi=31, divisors=_DIVISORS)
        sc = round_codes(scale, d, -32, 31).view(n, -1, 1)
        spread = d.expand(shape).reshape(n, -1, 1)
        sc = _best_neighbour(subs, w, spread, sc)
        indices = byte_codes(_NONLINEAR.indices(subs, spread * sc)).reshape(n, k)
        signed = sc.squeeze(-1).to(torch.int8).numpy().view(np.uint8)
        return assemble([f16_bytes(halves(d)), lane_bytes(signed, _SUBS)], _lanes(indices))

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        n = raw.shape[0]
        # IQ4_XS: float16 d, 8 x upper two bits of the scales, 8 x lower four, 128 nibble pairs
        blocks = raw.reshape(n, -1, 136)
        d = finite_f16(blocks[:, :, :2], "IQ4_XS scale")
        low = np.stack([blocks[:, :, 4:8] & 15, blocks[:, :, 4:8] >> 4], axis=-1)
        shifts = np.arange(0, 8, 2, dtype=np.uint8)
        high = (blocks[:, :, 2:4, None] >> shifts) & np.uint8(3)
        sc = low.reshape(n, -1) | (high.reshape(n, -1) << np.uint8(4))
        sc = (sc.view(np.int8) - np.int8(32)).view(np.uint8)
        pairs = blocks[:, :, 8:].reshape(n, -1, BLOCK // 2)
        return assemble([f16_bytes(d), lane_bytes(sc, _SUBS)], quads_to_lanes(pairs))

    def unpack_rows(self, tiles: Bytes) -> Floats:
        d = f16_values(tiles[:, :, :_F16_LANES])[..., None]
        sc = lane_values(tiles[:, :, _F16_LANES : self.header], _SUBS).view(np.int8)
        scale = d * sc.reshape(*d.shape[:2], _SUBS)
        values = _NONLINEAR.array[_indices(tiles, self.header)]
        values = values.reshape(*scale.shape, BLOCK) * scale[..., None]
        return values.reshape(len(d), -1)


def _power(exponent: Tensor) -> Tensor:
    """2^(e - 128) for int32 e in 2..255, as float32."""
    return ((exponent - 1) << 23).view(torch.float32)


def _best_neighbour(x: Tensor, w: Tensor | None, d: Tensor, sc: Tensor) -> Tensor:
    """Of each scale [N, C, 1] and its two neighbours the one of least true error."""
    best, best_error = torch.zeros_like(sc), weighted_sum(x * x, w)
    for step in (0, -1, 1):
        trial = (sc + step).clamp_(-32, 31)
        scale = d * trial
        error = squared_error(x, _NONLINEAR.nearest(x, scale) * scale, w)
        better = error < best_error
        best = torch.where(better, trial, best)
        best_error = torch.where(better, error, best_error)
    return best


FORMATS: tuple[TiledFormat, ...] = (Lut4NlFormat(), Mxfp4Format(), K4NlFormat())

"""nvfp4s: NVIDIA's 4-bit floats with a float32 factor above e4m3 scales, one per 16 channels.

value = factor * scale * e2m1, rounded to float32 after each product. Tile: 128 input channels; per
row a float32, half the factor (the table holds twice the values of e2m1), and eight e4m3 bytes;
then indices as in the other 4-bit formats.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moestro.core.errors import CheckpointError, UnsupportedFormat
from moestro.formats.base import LANES
from moestro.formats.search import Table, squared_error, weighted_sum
from moestro.formats.tiles import (
    Bytes,
    Floats,
    TiledFormat,
    assemble,
    byte_codes,
    code_blocks,
    lane_bytes,
    lane_values,
    lanes_to_quads,
    pair_nibbles,
    quads_to_lanes,
    split_nibbles,
)

_GROUP = 128
_SUB = 16
_SUBS = _GROUP // _SUB
_HEADER = (4 + _SUBS) * LANES
_BLOCK_NBYTES = LANES * 16
#: twice the values of e2m1, sign in the top bit
_E2M1 = Table((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
_LARGEST_SCALE = 448.0
#: kernels multiply factors by 2^8
_FACTOR_LIMIT = 2.0**120
# What becomes of a sub-group's largest magnitude: e2m1's 6, less (clipped), or its 4.
_LEVELS = (6.0, 5.5, 5.0, 6.5, 7.0, 4.0, 4.25, 3.75)


class Nvfp4ScaledFormat(TiledFormat):
    name = "nvfp4s"
    group_size = _GROUP
    code_max = 15
    code_middle = 0

    def tile_nbytes(self, cols: int) -> int:
        return _HEADER + _GROUP // 32 * _BLOCK_NBYTES

    def source_row_nbytes(self, source_type: str, cols: int) -> int:
        raise self.refuse(source_type)

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        raise self.refuse(source_type)

    def pack_codes(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> Tensor:
        """scales: e4m3 numbers [N, K / 16 rounded up]. factors: float32 [N]."""
        rows, cols = codes.shape
        if factors is None:
            raise UnsupportedFormat(f"format {self.name} needs a factor above its scales")
        self._check_codes(codes, scales, zeros, (rows, -(-cols // _SUB)))
        if tuple(factors.shape) != (rows,) or not bool((factors.abs() < _FACTOR_LIMIT).all()):
            raise CheckpointError("some factors of scales are not finite, or beyond all reason")
        stored = scales.to(torch.float8_e4m3fn)
        if not torch.equal(stored.to(torch.float32), scales):
            raise UnsupportedFormat(
                f"some scales are not e4m3 numbers, which format {self.name} has for scales"
            )
        padded = self.padded_cols(cols)
        shape = (-(-rows // LANES) * LANES, padded)
        indices, bytes_ = np.zeros(shape, np.uint8), np.zeros((shape[0], padded // _SUB), np.uint8)
        half = np.zeros((shape[0], padded // _GROUP), np.float32)
        indices[:rows, :cols] = codes.numpy()
        bytes_[:rows, : scales.shape[1]] = stored.view(torch.uint8).numpy()
        half[:rows] = factors.numpy()[:, None] * np.float32(0.5)
        return torch.from_numpy(_tiles(half, bytes_, indices)).view(-1)

    def pack_rows(self, x: Tensor, importance: Tensor | None) -> Bytes:
        n, k = x.shape
        tiles = x.view(n, k // _GROUP, _SUBS, _SUB)
        w = None if importance is None else importance.view(k // _GROUP, _SUBS, _SUB)
        # So that the largest sub-group has the largest scale: values are then up to 12 * 448.
        half = tiles.abs().amax((-1, -2)) / (12 * _LARGEST_SCALE)
        divisor = torch.where(half > 0, half, torch.ones(()))[..., None, None]
        scaled = torch.where(half[..., None, None] > 0, tiles / divisor, torch.zeros(()))
        largest = scaled.abs().amax(-1, keepdim=True)
        best = torch.zeros_like(largest)
        best_error = weighted_sum(scaled * scaled, w)
        for level in _LEVELS:
            trial = _to_e4m3(largest / (2 * level))
            values = _E2M1.nearest(scaled, trial)
            fitted = _to_e4m3(_least_squares(scaled, values, w))
            for scale in (trial, fitted):
                error = squared_error(scaled, _E2M1.nearest(scaled, scale) * scale, w)
                better = error < best_error
                best = torch.where(better, scale, best)
                best_error = torch.where(better, error, best_error)
        indices = byte_codes(_E2M1.indices(scaled, best)).reshape(n, k)
        bytes_ = best.to(torch.float8_e4m3fn).view(torch.uint8).reshape(n, -1)
        return _tiles(half.numpy(), bytes_.numpy(), indices)

    def unpack_rows(self, tiles: Bytes) -> Floats:
        b, g, _ = tiles.shape
        half = np.ascontiguousarray(tiles[:, :, : 4 * LANES]).view(np.float32)
        half = half.transpose(0, 2, 1).reshape(b * LANES, g, 1)
        bytes_ = lane_values(tiles[:, :, 4 * LANES : _HEADER], _SUBS)
        scale = torch.from_numpy(np.ascontiguousarray(bytes_)).view(torch.float8_e4m3fn)
        scale_values = scale.to(torch.float32).numpy().reshape(b * LANES, g, _SUBS) * half
        indices = split_nibbles(lanes_to_quads(code_blocks(tiles, _HEADER, _BLOCK_NBYTES)))
        values = _E2M1.array[indices].reshape(b * LANES, g, _SUBS, _SUB)
        return (scale_values[..., None] * values).reshape(b * LANES, -1)


def _tiles(half: Floats, scales: Bytes, indices: Bytes) -> Bytes:
    """float32 [N, G], e4m3 [N, 8 G] and indices [N, K] -> tiles uint8 [B, G, tile]."""
    n, g = half.shape
    lanes = half.reshape(n // LANES, LANES, g).transpose(0, 2, 1)
    headers = [np.ascontiguousarray(lanes).view(np.uint8), lane_bytes(scales, _SUBS)]
    return assemble(headers, quads_to_lanes(pair_nibbles(indices)))


def _to_e4m3(scale: Tensor) -> Tensor:
    return scale.clamp(0, _LARGEST_SCALE).to(torch.float8_e4m3fn).to(torch.float32)


def _least_squares(x: Tensor, values: Tensor, w: Tensor | None) -> Tensor:
    """The scale of least error for these values of the table."""
    norm = weighted_sum(values * values, w)
    return torch.where(norm > 0, weighted_sum(x * values, w) / norm, torch.zeros(()))


FORMATS = (Nvfp4ScaledFormat(),)

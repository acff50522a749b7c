"""Weights kept as floating point: f32, f16, bf16. Tiles of 16 channels x 32."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moestro.core.errors import CheckpointError
from moestro.formats.base import LANES
from moestro.formats.tiles import BLOCK, Bytes, Floats, TiledFormat


class FloatFormat(TiledFormat):
    """16 channels x 32 elements of one float type; ``run`` consecutive k of a channel adjoin.

    exponent: the bits of the exponent, all set only in NaN and infinity.
    """

    is_float = True

    def __init__(
        self, name: str, source_type: str, dtype: torch.dtype, *, run: int, exponent: int
    ) -> None:
        self.name = name
        self.group_size = BLOCK
        self.exact_from = (source_type,)
        self._dtype = dtype
        self._run = run
        # Moved as integers, which numpy has for every size.
        self._word = np.dtype(f"u{dtype.itemsize}")
        self._exponent = exponent

    def tile_nbytes(self, cols: int) -> int:
        return LANES * BLOCK * self._dtype.itemsize

    def source_row_nbytes(self, source_type: str, cols: int) -> int:
        return cols * self._dtype.itemsize

    def pack_rows(self, x: Tensor, importance: Tensor | None) -> Bytes:
        values = x.to(self._dtype)
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(
                f"weights up to {float(x.abs().max()):.4g} exceed the range of {self.name} "
                f"(largest {torch.finfo(self._dtype).max:.4g}); use a wider format"
            )
        return self._tiles(values.contiguous().view(torch.uint8).numpy())

    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        words = np.ascontiguousarray(raw).view(self._word)
        bad = int(np.count_nonzero((words & self._exponent) == self._exponent))
        if bad:
            raise CheckpointError(f"{bad} of {words.size} weights are not finite")
        extra = -words.shape[1] % BLOCK
        return self._tiles(np.pad(words, ((0, 0), (0, extra))).view(np.uint8) if extra else raw)

    def unpack_rows(self, tiles: Bytes) -> Floats:
        b, g, _ = tiles.shape
        lanes = tiles.view(self._word).reshape(b, g, BLOCK // self._run, LANES, self._run)
        words = lanes.transpose(0, 3, 1, 2, 4).reshape(b * LANES, g * BLOCK)
        if self._dtype == torch.bfloat16:  # the upper half of a float32
            return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return words.view(f"f{self._dtype.itemsize}").astype(np.float32)

    def _tiles(self, rows: Bytes) -> Bytes:
        words = np.ascontiguousarray(rows).view(self._word)
        n, k = words.shape
        lanes = words.reshape(n // LANES, LANES, k // BLOCK, BLOCK // self._run, self._run)
        tiles = lanes.transpose(0, 2, 3, 1, 4).reshape(n // LANES, k // BLOCK, -1)
        return np.ascontiguousarray(tiles).view(np.uint8)


FORMATS = (
    FloatFormat("f32", "F32", torch.float32, run=1, exponent=0x7F80_0000),
    FloatFormat("f16", "F16", torch.float16, run=1, exponent=0x7C00),
    FloatFormat("bf16", "BF16", torch.bfloat16, run=2, exponent=0x7F80),
)

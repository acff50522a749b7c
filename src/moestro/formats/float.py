"""Weights kept as floating point: f32, f16, bf16. Tiles of 16 channels x 32."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.core.errors import CheckpointError
from moestro.formats.base import LANES, require_finite
from moestro.formats.tiles import BLOCK, TiledFormat


class FloatFormat(TiledFormat):
    """16 channels x 32 elements of one float type; ``run`` consecutive k of a channel adjoin."""

    is_float = True

    def __init__(self, name: str, source_type: str, dtype: torch.dtype, run: int) -> None:
        self.name = name
        self.group_size = BLOCK
        self.exact_from = (source_type,)
        self._dtype = dtype
        self._run = run

    def tile_nbytes(self, cols: int) -> int:
        return LANES * BLOCK * self._dtype.itemsize

    def source_row_nbytes(self, source_type: str, cols: int) -> int:
        return cols * self._dtype.itemsize

    def pack_rows(self, x: Tensor, importance: Tensor | None) -> Tensor:
        values = x.to(self._dtype)
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(
                f"weights up to {float(x.abs().max()):.4g} exceed the range of {self.name} "
                f"(largest {torch.finfo(self._dtype).max:.4g}); use a wider format"
            )
        return self._tiles(values)

    def repack_rows(self, source_type: str, raw: Tensor) -> Tensor:
        values = raw.contiguous().view(self._dtype)
        require_finite(values)
        pad = -values.shape[1] % BLOCK
        return self._tiles(torch.nn.functional.pad(values, (0, pad)) if pad else values)

    def unpack_rows(self, tiles: Tensor) -> Tensor:
        b, g, _ = tiles.shape
        values = tiles.contiguous().view(self._dtype)
        lanes = values.view(b, g, BLOCK // self._run, LANES, self._run)
        return lanes.permute(0, 3, 1, 2, 4).reshape(b * LANES, g * BLOCK).to(torch.float32)

    def _tiles(self, values: Tensor) -> Tensor:
        n, k = values.shape
        lanes = values.reshape(n // LANES, LANES, k // BLOCK, BLOCK // self._run, self._run)
        tiles = lanes.permute(0, 2, 3, 1, 4).reshape(n // LANES, k // BLOCK, -1)
        return tiles.contiguous().view(torch.uint8)


FORMATS = (
    FloatFormat("f32", "F32", torch.float32, 1),
    FloatFormat("f16", "F16", torch.float16, 1),
    FloatFormat("bf16", "BF16", torch.bfloat16, 2),
)

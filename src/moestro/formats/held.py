"""What formats share that hold what others quantized, but that weights are not quantized to."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moestro.formats.base import LANES
from moestro.formats.tiles import Bytes, Halves, TiledFormat


class HeldFormat(TiledFormat):
    """A TiledFormat of ``repack_rows`` alone."""

    quantizes = False

    def pack_rows(self, x: Tensor, importance: Tensor | None) -> Bytes:
        raise self.refuse("float")

    def example(self, rows: int, cols: int) -> Tensor:
        tiles = self._empty(rows, cols)
        random = np.random.default_rng(1)
        tiles[:] = random.integers(0, 256, tiles.shape, dtype=np.uint8)
        scales = random.uniform(0.5, 1.0, (*tiles.shape[:2], LANES)).astype(np.float16)
        self.set_scales(tiles, scales)
        return torch.from_numpy(tiles).view(-1)

    def set_scales(self, tiles: Bytes, scales: Halves) -> None:
        """Put float16 scales [B, G, 16] of about one into tiles of random bytes."""
        tiles[:, :, : 2 * LANES] = scales.view(np.uint8)

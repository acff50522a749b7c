"""What all packed formats share: padding, tile shuffles, and work in bounded row chunks.

A format implements three small functions over whole 16-row blocks; chunking, padding, argument
checks and slicing are done here once. Shape letters: N rows (multiple of 16), K columns (multiple
of the group), B = N / 16 row blocks, G = K / group groups, C = K / 32 code blocks of 32 channels.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from moestro.core.errors import CheckpointError
from moestro.formats.base import LANES, Format, require_finite, round_up

#: channels in one code block of every integer format
BLOCK = 32

#: elements packed or decoded at a time; keeps temporaries in cache and memory bounded
_CHUNK_ELEMENTS = 1 << 17


class TiledFormat(Format):
    """A Format that only has to know how to handle whole 16-row blocks."""

    #: pad columns with the row's last value instead of zero, and give them no weight: for formats
    #: with a minimum, whose range would otherwise be widened to reach a zero nobody reads
    pads_with_last = False

    @abstractmethod
    def pack_rows(self, x: Tensor, importance: Tensor | None) -> Tensor:
        """float32 [N, K] (padded) -> uint8 [B, G, tile]. ``importance`` is [K], 0 on padding."""

    @abstractmethod
    def repack_rows(self, source_type: str, raw: Tensor) -> Tensor:
        """uint8 [N, bytes per source row] -> uint8 [B, G, tile]."""

    @abstractmethod
    def unpack_rows(self, tiles: Tensor) -> Tensor:
        """uint8 [B, G, tile] -> float32 [N, K]."""

    @abstractmethod
    def source_row_nbytes(self, source_type: str, cols: int) -> int:
        """Bytes of one row of ``cols`` channels in the checkpoint."""

    def pack(self, weight: Tensor, *, importance: Tensor | None = None) -> Tensor:
        if weight.dim() != 2 or not weight.dtype.is_floating_point:
            raise CheckpointError(
                f"format {self.name} packs float matrices [N, K], got {weight.dtype} "
                f"{list(weight.shape)}"
            )
        rows, cols = weight.shape
        padded = self.padded_cols(cols)
        weights = self._channel_weights(importance, cols, padded)
        out = self._empty(rows, cols)
        for start, stop in _row_chunks(rows, padded):
            x = weight[start:stop].to(torch.float32)
            require_finite(x)
            tiles = self.pack_rows(self._pad(x, padded), weights)
            out[start // LANES : start // LANES + tiles.shape[0]] = tiles
        return out.view(-1)

    def pack_exact(self, source_type: str, raw: Tensor, rows: int, cols: int) -> Tensor:
        if source_type not in self.exact_from:
            raise self.refuse(source_type)
        row_nbytes = self.source_row_nbytes(source_type, cols)
        if raw.dtype != torch.uint8 or raw.numel() != rows * row_nbytes:
            raise CheckpointError(
                f"{source_type} [{rows}, {cols}] is {rows * row_nbytes} bytes, got {raw.numel()} "
                f"of {raw.dtype}"
            )
        source = raw.reshape(rows, row_nbytes)
        out = self._empty(rows, cols)
        for start, stop in _row_chunks(rows, self.padded_cols(cols)):
            tiles = self.repack_rows(source_type, _pad_rows(source[start:stop]))
            out[start // LANES : start // LANES + tiles.shape[0]] = tiles
        return out.view(-1)

    def unpack(self, data: Tensor, rows: int, cols: int) -> Tensor:
        if data.dtype != torch.uint8 or data.numel() != self.nbytes(rows, cols):
            raise CheckpointError(
                f"{self.name} [{rows}, {cols}] is {self.nbytes(rows, cols)} bytes, got "
                f"{data.numel()} of {data.dtype}"
            )
        padded = self.padded_cols(cols)
        tiles = data.reshape(-1, padded // self.group(cols), self.tile_nbytes(cols))
        out = torch.empty(rows, cols)
        for start, stop in _row_chunks(rows, padded):
            blocks = tiles[start // LANES : round_up(stop, LANES) // LANES]
            out[start:stop] = self.unpack_rows(blocks)[: stop - start, :cols]
        return out

    def _empty(self, rows: int, cols: int) -> Tensor:
        blocks = round_up(rows, LANES) // LANES
        groups = self.padded_cols(cols) // self.group(cols)
        return torch.empty(blocks, groups, self.tile_nbytes(cols), dtype=torch.uint8)

    def _pad(self, x: Tensor, padded: int) -> Tensor:
        rows, cols = x.shape
        if cols == padded and rows % LANES == 0:
            return x.contiguous()
        out = torch.zeros(round_up(rows, LANES), padded)
        out[:rows, :cols] = x
        if self.pads_with_last and cols:
            out[:rows, cols:] = x[:, -1:]
        return out

    def _channel_weights(self, importance: Tensor | None, cols: int, padded: int) -> Tensor | None:
        """Importance [K] with padding at zero; None when every channel counts the same.

        Relative to the mean and lifted a little above zero: a channel that calibration never saw
        must keep its weights.
        """
        if importance is None:
            if cols == padded or not self.pads_with_last:
                return None
            importance = torch.ones(cols)
        if importance.shape != (cols,):
            raise CheckpointError(
                f"importance has shape {list(importance.shape)}, the matrix has {cols} columns"
            )
        importance = importance.to(torch.float32)
        require_finite(importance, "importance")
        if bool((importance < 0).any()):
            raise CheckpointError("importance holds negative values; it weights squared errors")
        mean = float(importance.mean())
        out = torch.zeros(padded)
        out[:cols] = importance / mean + 1e-4 if mean > 0 else 1.0
        return out


def _row_chunks(rows: int, padded_cols: int) -> list[tuple[int, int]]:
    step = max(LANES, _CHUNK_ELEMENTS // max(padded_cols, 1) // LANES * LANES)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _pad_rows(source: Tensor) -> Tensor:
    rows = source.shape[0]
    if rows % LANES == 0:
        return source
    return torch.cat([source, source.new_zeros(round_up(rows, LANES) - rows, source.shape[1])])


def f16_bytes(values: Tensor) -> Tensor:
    """float16 [N, G] -> tile header bytes [B, G, 32]: the 16 rows of a block side by side."""
    n, g = values.shape
    lanes = values.view(n // LANES, LANES, g).transpose(1, 2).contiguous()
    return lanes.view(torch.uint8)


def f16_values(header: Tensor) -> Tensor:
    """Tile header bytes [B, G, 32] -> float32 [N, G]."""
    lanes = header.contiguous().view(torch.float16)
    return lanes.transpose(1, 2).reshape(-1, header.shape[1]).to(torch.float32)


def lane_bytes(values: Tensor, per_tile: int) -> Tensor:
    """uint8 [N, G * per_tile] -> [B, G, per_tile * 16], byte ``i * 16 + c`` of each tile."""
    n, total = values.shape
    lanes = values.view(n // LANES, LANES, total // per_tile, per_tile)
    return lanes.permute(0, 2, 3, 1).reshape(n // LANES, total // per_tile, per_tile * LANES)


def lane_values(header: Tensor, per_tile: int) -> Tensor:
    """Inverse of ``lane_bytes``: uint8 [B, G, per_tile * 16] -> [N, G * per_tile]."""
    b, g, _ = header.shape
    lanes = header.reshape(b, g, per_tile, LANES).permute(0, 3, 1, 2)
    return lanes.reshape(b * LANES, g * per_tile)


def quads_to_lanes(quads: Tensor) -> Tensor:
    """uint8 [N, C, 4q] of consecutive bytes -> [B, C, 64q]: 16 rows side by side, 4 bytes each."""
    n, c, width = quads.shape
    words = quads.contiguous().view(torch.int32).view(n // LANES, LANES, c, width // 4)
    lanes = words.permute(0, 2, 3, 1).contiguous()
    return lanes.view(torch.uint8).view(n // LANES, c, width * LANES)


def lanes_to_quads(lanes: Tensor) -> Tensor:
    """Inverse of ``quads_to_lanes``: uint8 [B, C, 64q] -> [N, C, 4q]."""
    b, c, width = lanes.shape
    words = lanes.contiguous().view(torch.int32).view(b, c, width // 64, LANES)
    quads = words.permute(0, 3, 1, 2).contiguous()
    return quads.view(torch.uint8).view(b * LANES, c, width // LANES)


def pair_nibbles(codes: Tensor) -> Tensor:
    """4-bit codes uint8 [N, K] -> [N, C, 16]: channel k low, channel k + 16 high."""
    halves = codes.view(codes.shape[0], -1, 2, BLOCK // 2)
    return halves[:, :, 0] | (halves[:, :, 1] << 4)


def split_nibbles(paired: Tensor) -> Tensor:
    """Inverse of ``pair_nibbles``: uint8 [N, C, 16] -> [N, K]."""
    return torch.cat([paired & 15, paired >> 4], dim=-1).view(paired.shape[0], -1)


def assemble(headers: list[Tensor], blocks: Tensor) -> Tensor:
    """Headers [B, G, bytes] and code blocks [B, C, bytes] -> tiles uint8 [B, G, tile]."""
    b, g, _ = headers[0].shape
    return torch.cat([*headers, blocks.reshape(b, g, -1)], dim=-1)


def code_blocks(tiles: Tensor, header: int, block_nbytes: int) -> Tensor:
    """The code part of tiles [B, G, tile] -> [B, C, block_nbytes]."""
    return tiles[:, :, header:].reshape(tiles.shape[0], -1, block_nbytes)


def finite_f16(raw: Tensor, name: str) -> Tensor:
    """Two little-endian bytes [..., 2] -> float16 [...]. Raises CheckpointError for NaN or Inf."""
    values = raw.contiguous().view(torch.float16).squeeze(-1)
    require_finite(values, name)
    return values

"""What all packed formats share: the way to the native packers, and the reference they must equal.

A format implements three small functions over whole 16-row blocks; pieces, padding, argument checks
and slicing are done here once. They define the format's bytes, and pack where the native core does
not; where it does, on the thread team, it gives the same bytes. Shape letters: N rows
(multiple of 16), K columns (multiple of the group), B = N / 16 row blocks, G = K / group groups,
C = K / 32 code blocks of 32 channels.

In Python, bytes are shuffled with numpy, which never starts threads, and searched with torch in
pieces too small for torch to split: so it costs one core per caller, also on a machine whose cores
are busy, and callers may run several at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import moestro._core as core
from moestro.core.errors import CheckpointError, UnsupportedFormat
from moestro.formats.base import (
    LANES,
    Format,
    packed_buffer,
    placed,
    require_finite,
    round_up,
)

#: channels in one code block of every integer format
BLOCK = 32

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]
Floats = npt.NDArray[np.float32]
Scales = npt.NDArray[Any]

# What the native packers read as it is.
_NATIVE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Elements searched at a time: just below where torch begins to use several threads for one
# operation (at::internal::GRAIN_SIZE).
_SEARCH_ELEMENTS = 32767
# Elements repacked or decoded at a time: temporaries stay within a core's L2 cache.
_SHUFFLE_ELEMENTS = 1 << 17


class TiledFormat(Format):
    """A Format that only has to know how to handle whole 16-row blocks."""

    #: pad columns with the row's last value instead of zero, and give them no weight: for formats
    #: with a minimum, whose range would otherwise be widened to reach a zero nobody reads, and for
    #: formats without an exact zero
    pads_with_last = False
    #: of integer formats: the largest code, and the code that means zero where no zero points are
    code_max = 0
    code_middle: int | None = None

    @abstractmethod
    def pack_rows(self, x: Tensor, importance: Tensor | None) -> Bytes:
        """float32 [N, K] (padded) -> uint8 [B, G, tile]. ``importance`` is [K], 0 on padding."""

    @abstractmethod
    def repack_rows(self, source_type: str, raw: Bytes) -> Bytes:
        """uint8 [N, bytes per source row] -> uint8 [B, G, tile]."""

    @abstractmethod
    def unpack_rows(self, tiles: Bytes) -> Floats:
        """uint8 [B, G, tile] -> float32 [N, K]."""

    @abstractmethod
    def source_row_nbytes(self, source_type: str, cols: int) -> int:
        """Bytes of one row of ``cols`` channels in the checkpoint."""

    def packs_natively(self, source_type: str) -> bool:
        if source_type in self.exact_from:
            return bool(core.can_repack(self.name, source_type))
        return bool(core.can_quantize(self.name))

    def pack(
        self, weight: Tensor, *, importance: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if not core.can_quantize(self.name) or not weight.numel():
            return placed(self.pack_reference(weight, importance=importance), out)
        return self.pack_measured(weight, importance=importance, out=out)[0]

    def pack_measured(
        self, weight: Tensor, *, importance: Tensor | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, float, float]:
        if not core.can_quantize(self.name) or not weight.numel():
            return super().pack_measured(weight, importance=importance, out=out)
        rows, cols = self._matrix_shape(weight)
        values = weight if weight.dtype in _NATIVE_DTYPES else weight.to(torch.float32)
        weights = self._channel_weights(importance, cols, self.padded_cols(cols))
        if out is None:
            out = packed_buffer(self.nbytes(rows, cols))
        error, norm = core.quantize(self.name, values.detach().contiguous(), weights, out)
        return out, error, norm

    def pack_exact(
        self,
        source_type: str,
        raw: Tensor,
        rows: int,
        cols: int,
        *,
        out: Tensor | None = None,
        alone: bool = False,
    ) -> Tensor:
        if source_type not in self.exact_from:
            raise self.refuse(source_type)
        if not core.can_repack(self.name, source_type) or not raw.numel():
            return placed(self.pack_exact_reference(source_type, raw, rows, cols), out)
        self._check_source(source_type, raw, rows, cols)
        if out is None:
            out = packed_buffer(self.nbytes(rows, cols))
        core.repack(self.name, source_type, raw.contiguous().view(-1), rows, cols, out, alone)
        return out

    def pack_reference(self, weight: Tensor, *, importance: Tensor | None = None) -> Tensor:
        """What ``pack`` gives, from ``pack_rows``, in Python."""
        rows, cols = self._matrix_shape(weight)
        group, padded = self.group(cols), self.padded_cols(cols)
        weights = self._channel_weights(importance, cols, padded)
        out = self._empty(rows, cols)
        for start, stop, left, right in _cells(rows, padded, group):
            x = weight[start:stop, left:right].to(torch.float32)
            require_finite(x)
            w = None if weights is None else weights[left:right]
            tiles = self.pack_rows(self._pad(x, right - left), w)
            first = start // LANES
            out[first : first + tiles.shape[0], left // group : right // group] = tiles
        return torch.from_numpy(out).view(-1)

    def pack_exact_reference(self, source_type: str, raw: Tensor, rows: int, cols: int) -> Tensor:
        """What ``pack_exact`` gives, from ``repack_rows``, in Python."""
        self._check_source(source_type, raw, rows, cols)
        source = raw.reshape(rows, -1).numpy()
        out = self._empty(rows, cols)
        for start, stop in _row_chunks(rows, self.padded_cols(cols)):
            tiles = self.repack_rows(source_type, _pad_rows(source[start:stop]))
            out[start // LANES : start // LANES + tiles.shape[0]] = tiles
        return torch.from_numpy(out).view(-1)

    def _matrix_shape(self, weight: Tensor) -> tuple[int, int]:
        if weight.dim() != 2 or not weight.dtype.is_floating_point:
            raise CheckpointError(
                f"format {self.name} packs float matrices [N, K], got {weight.dtype} "
                f"{list(weight.shape)}"
            )
        rows, cols = weight.shape
        return rows, cols

    def _check_source(self, source_type: str, raw: Tensor, rows: int, cols: int) -> None:
        row_nbytes = self.source_row_nbytes(source_type, cols)
        if raw.dtype != torch.uint8 or raw.numel() != rows * row_nbytes:
            raise CheckpointError(
                f"{source_type} [{rows}, {cols}] is {rows * row_nbytes} bytes, got {raw.numel()} "
                f"of {raw.dtype}"
            )

    def code_rows(self, codes: Bytes, scale: Scales, zeros: Bytes | None) -> Bytes:
        """Codes uint8 [N, K] (padded), stored scales and zero points [N, G] -> [B, G, tile]."""
        raise UnsupportedFormat(f"format {self.name} does not hold integer codes with scales")

    def stored_scales(self, scales: Floats) -> Scales:
        """float32 scales in the type that the format keeps them in, of the same values."""
        return half_scales(scales, self.name)

    def pack_codes(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> Tensor:
        if factors is not None:
            raise UnsupportedFormat(f"format {self.name} has one level of scales")
        rows, cols = codes.shape
        group, padded = self.group(cols), self.padded_cols(cols)
        per_row = (rows, padded // group)
        self._check_codes(codes, scales, zeros, per_row)
        stored = self.stored_scales(scales.numpy())
        out = self._empty(rows, cols)
        for start, stop in _row_chunks(rows, padded):
            if zeros is None:
                points = np.full((stop - start, per_row[1]), self.code_middle or 0, np.uint8)
            else:
                points = zeros[start:stop].numpy()
            chunk = np.repeat(points, group, axis=1)  # padding is the code of zero
            chunk[:, :cols] = codes[start:stop].numpy()
            tiles = self.code_rows(
                _pad_rows(chunk),
                _pad_rows(stored[start:stop]),
                None if zeros is None else _pad_rows(points),
            )
            out[start // LANES : start // LANES + tiles.shape[0]] = tiles
        return torch.from_numpy(out).view(-1)

    def _check_codes(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None, per_row: tuple[int, int]
    ) -> None:
        if not self.code_max:
            raise UnsupportedFormat(f"format {self.name} does not hold integer codes with scales")
        wanted = [("codes", codes, torch.uint8, tuple(codes.shape))]
        wanted.append(("scales", scales, torch.float32, per_row))
        if zeros is not None:
            wanted.append(("zero points", zeros, torch.uint8, per_row))
        for what, values, dtype, shape in wanted:
            if values.dtype != dtype or tuple(values.shape) != shape:
                raise CheckpointError(
                    f"format {self.name} needs {what} {dtype} {list(shape)}, got {values.dtype} "
                    f"{list(values.shape)}"
                )
        if (zeros is None) != (self.code_middle is not None):
            has = "has no" if zeros is not None else "needs"
            raise UnsupportedFormat(f"format {self.name} {has} zero points")
        highest = max(int(v.numpy().max(initial=0)) for v in (codes, zeros) if v is not None)
        if highest > self.code_max:
            raise CheckpointError(
                f"format {self.name} has codes and zero points 0 to {self.code_max}, got {highest}"
            )

    def unpack(self, data: Tensor, rows: int, cols: int) -> Tensor:
        if data.dtype != torch.uint8 or data.numel() != self.nbytes(rows, cols):
            raise CheckpointError(
                f"{self.name} [{rows}, {cols}] is {self.nbytes(rows, cols)} bytes, got "
                f"{data.numel()} of {data.dtype}"
            )
        padded = self.padded_cols(cols)
        tiles = data.numpy().reshape(-1, padded // self.group(cols), self.tile_nbytes(cols))
        out = np.empty((rows, cols), dtype=np.float32)
        for start, stop in _row_chunks(rows, padded):
            blocks = tiles[start // LANES : round_up(stop, LANES) // LANES]
            out[start:stop] = self.unpack_rows(blocks)[: stop - start, :cols]
        return torch.from_numpy(out)

    def _empty(self, rows: int, cols: int) -> Bytes:
        blocks = round_up(rows, LANES) // LANES
        groups = self.padded_cols(cols) // self.group(cols)
        return np.empty((blocks, groups, self.tile_nbytes(cols)), dtype=np.uint8)

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
    step = max(LANES, _SHUFFLE_ELEMENTS // max(padded_cols, 1) // LANES * LANES)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _cells(rows: int, padded_cols: int, group: int) -> Iterator[tuple[int, int, int, int]]:
    """(start, stop, left, right) of pieces that are whole row blocks and whole groups."""
    if padded_cols == 0:
        return
    widest = max(group, _SEARCH_ELEMENTS // LANES // group * group)
    width = round_up(-(-padded_cols // -(-padded_cols // widest)), group)
    height = max(LANES, _SEARCH_ELEMENTS // width // LANES * LANES)
    for start in range(0, rows, height):
        for left in range(0, padded_cols, width):
            yield start, min(start + height, rows), left, min(left + width, padded_cols)


def _pad_rows(source: npt.NDArray[Any]) -> npt.NDArray[Any]:
    extra = -source.shape[0] % LANES
    return np.pad(source, ((0, extra), (0, 0))) if extra else source


def f16_bytes(values: Halves) -> Bytes:
    """float16 [N, G] -> tile header bytes [B, G, 32]: the 16 rows of a block side by side."""
    n, g = values.shape
    lanes = values.reshape(n // LANES, LANES, g).transpose(0, 2, 1)
    return np.ascontiguousarray(lanes).view(np.uint8)


def f16_values(header: Bytes) -> Floats:
    """Tile header bytes [B, G, 32] -> float32 [N, G]."""
    lanes = np.ascontiguousarray(header).view(np.float16)
    return lanes.transpose(0, 2, 1).reshape(-1, header.shape[1]).astype(np.float32)


def lane_bytes(values: Bytes, per_tile: int) -> Bytes:
    """uint8 [N, G * per_tile] -> [B, G, per_tile * 16], byte ``i * 16 + c`` of each tile."""
    n, total = values.shape
    lanes = values.reshape(n // LANES, LANES, total // per_tile, per_tile)
    return lanes.transpose(0, 2, 3, 1).reshape(n // LANES, total // per_tile, per_tile * LANES)


def lane_values(header: Bytes, per_tile: int) -> Bytes:
    """Inverse of ``lane_bytes``: uint8 [B, G, per_tile * 16] -> [N, G * per_tile]."""
    b, g, _ = header.shape
    lanes = header.reshape(b, g, per_tile, LANES).transpose(0, 3, 1, 2)
    return lanes.reshape(b * LANES, g * per_tile)


def quads_to_lanes(quads: Bytes) -> Bytes:
    """uint8 [N, C, 4q] of consecutive bytes -> [B, C, 64q]: 16 rows side by side, 4 bytes each."""
    n, c, width = quads.shape
    words = np.ascontiguousarray(quads).view(np.uint32).reshape(n // LANES, LANES, -1)
    lanes = np.ascontiguousarray(words.transpose(0, 2, 1))
    return lanes.view(np.uint8).reshape(n // LANES, c, width * LANES)


def lanes_to_quads(lanes: Bytes) -> Bytes:
    """Inverse of ``quads_to_lanes``: uint8 [B, C, 64q] -> [N, C, 4q]."""
    b, c, width = lanes.shape
    words = np.ascontiguousarray(lanes).view(np.uint32).reshape(b, -1, LANES)
    quads = np.ascontiguousarray(words.transpose(0, 2, 1))
    return quads.view(np.uint8).reshape(b * LANES, c, width // LANES)


def pair_nibbles(codes: Bytes) -> Bytes:
    """4-bit codes uint8 [N, K] -> [N, C, 16]: channel k low, channel k + 16 high."""
    pairs = codes.reshape(codes.shape[0], -1, 2, BLOCK // 2)
    return pairs[:, :, 0] | (pairs[:, :, 1] << np.uint8(4))


def split_nibbles(paired: Bytes) -> Bytes:
    """Inverse of ``pair_nibbles``: uint8 [N, C, 16] -> [N, K]."""
    return np.concatenate([paired & 15, paired >> 4], axis=-1).reshape(paired.shape[0], -1)


def join_bits(values: Bytes, bits: int) -> Bytes:
    """1-bit or 2-bit values [N, K] -> planes [N, C, 4 * bits].

    Byte ``h*4 + i`` holds s = 8 / bits channels, ``4 * (h * s + jj) + i`` from bit jj*bits on.
    """
    per_byte = 8 // bits
    quads = values.reshape(values.shape[0], -1, bits, per_byte, 4)
    joined = quads[:, :, :, 0].copy()
    for at in range(1, per_byte):
        joined |= quads[:, :, :, at] << np.uint8(at * bits)
    return joined.reshape(values.shape[0], -1, 4 * bits)


def split_bits(planes: Bytes, bits: int) -> Bytes:
    """Inverse of ``join_bits``: [N, C, 4 * bits] -> [N, K]."""
    n, c, _ = planes.shape
    mask = np.uint8((1 << bits) - 1)
    parts = planes.reshape(n, c, bits, 1, 4)
    quads = [(parts >> np.uint8(at * bits)) & mask for at in range(8 // bits)]
    return np.concatenate(quads, axis=3).reshape(n, -1)


def assemble(headers: list[Bytes], blocks: Bytes) -> Bytes:
    """Headers [B, G, bytes] and code blocks [B, C, bytes] -> tiles uint8 [B, G, tile]."""
    b, g, _ = headers[0].shape
    return np.concatenate([*headers, blocks.reshape(b, g, -1)], axis=-1)


def code_blocks(tiles: Bytes, header: int, block_nbytes: int) -> Bytes:
    """The code part of tiles [B, G, tile] -> [B, C, block_nbytes]."""
    return tiles[:, :, header:].reshape(tiles.shape[0], -1, block_nbytes)


def finite_f16(raw: Bytes, name: str) -> Halves:
    """Two little-endian bytes [..., 2] -> float16 [...]. Raises CheckpointError for NaN or Inf."""
    values = np.ascontiguousarray(raw).view(np.float16)[..., 0]
    bad = int(np.count_nonzero((values.view(np.uint16) & 0x7C00) == 0x7C00))
    if bad:
        raise CheckpointError(f"{name}: {bad} of {values.size} weights are not finite")
    return values


def half_scales(scales: Floats, format_name: str) -> Halves:
    """float32 [...] -> float16 of the same values.

    Raises CheckpointError for NaN or infinity, UnsupportedFormat for what float16 cannot hold.
    """
    if not np.isfinite(scales).all():
        raise CheckpointError("some scales are not finite")
    with np.errstate(over="ignore"):
        half = scales.astype(np.float16)
    inexact = half.astype(np.float32) != scales
    if inexact.any():
        raise UnsupportedFormat(
            f"{int(inexact.sum())} of {scales.size} scales (such as {scales[inexact][0]:.6g}) are "
            f"not float16 numbers, which format {format_name} has for scales; accept the rounding "
            f"by naming a format: moestro convert MODEL OUT --format {format_name}"
        )
    return half


def halves(scale: Tensor) -> Halves:
    """Float scales [N, G, 1] that float16 holds exactly -> float16 [N, G]."""
    return scale.squeeze(-1).to(torch.float16).numpy()


def byte_codes(codes: Tensor) -> Bytes:
    """Float codes 0..255 -> uint8 of the same shape."""
    return codes.to(torch.uint8).numpy()

"""Turns found tensors into packed bytes: read, undo row permutations, repack or quantize, measure.

One tensor, one expert, or some rows of it are in memory at a time. Repacking is exact whenever the
target format lists the source's type; anything else happens only because the policy named that
format.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from moestro.checkpoints.base import Checkpoint, TensorInfo
from moestro.checkpoints.quant_codes import Codes, read_codes
from moestro.checkpoints.quantized import QuantizedInfo
from moestro.core import env
from moestro.core.errors import CheckpointError, UnsupportedFormat
from moestro.formats.base import LANES, Format, require_finite
from moestro.machine import facts
from moestro.memory.expert_bank import PROJECTION_NAMES
from moestro.memory.sources import ExpertsSource, Part, Source
from moestro.memory.stored_rows import (
    CodedRows,
    RawRows,
    StoredRows,
    TransposedRows,
    pick_head_rows,
    to_float,
)

# Weights that one thread packs at a time: 1 MiB as float32.
_SLAB_ELEMENTS = 1 << 18
# More threads than this only wait for Python between their operations.
_MAX_THREADS = 16

#: activation second moments by key, float32 [K] (or [E, K] for ``<experts key>.gate|up|down``)
Importance = Mapping[str, Tensor]


@dataclass
class ErrorSum:
    """Squared error and squared norm, summed over what was packed."""

    error: float = 0.0
    norm: float = 0.0

    @property
    def relative(self) -> float:
        """Root of error over norm; 0 for a lossless or all-zero weight."""
        return float((self.error / self.norm) ** 0.5) if self.norm > 0 else 0.0


class Packer:
    """Packs the sources of one checkpoint on all cores; a context manager, which ends its threads.

    ``measure``: also sum up the errors of lossy packing.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, importance: Importance | None = None, measure: bool = False
    ) -> None:
        self.checkpoint = checkpoint
        self.importance: Importance = importance or {}
        self.measure = measure
        self._gguf = checkpoint.container == "gguf"
        self.threads = min(env.threads() or facts.gather().threads, _MAX_THREADS)
        self._pool = ThreadPoolExecutor(self.threads, "moestro-pack")

    def __enter__(self) -> Packer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def vector(self, source: Source) -> Tensor:
        """float32 of the spec's shape. Raises CheckpointError for non-finite values."""
        info = source.info
        if source.values is not None:
            return source.values
        raw = self._unpermute(self.checkpoint.read(info.name), source, source.spec.shape[0])
        values = to_float(info.dtype, raw, 1, math.prod(info.shape))
        require_finite(values, f"{self.checkpoint.path}: {info.name}")
        return values.reshape(source.spec.shape).contiguous()

    def read_matrix(self, source: Source, rows: tuple[int, int] | None = None) -> StoredRows:
        """A matrix as the checkpoint stores it; may run beside packing. rows: only the output
        channels [start, stop), both multiples of ``rows_together`` or the end; for matrices that
        are stored alone and in one tensor.
        """
        info, picked = source.info, source.head_rows
        found: StoredRows
        if rows is not None:
            start, stop = rows
            raw = self._read_rows(info, source.rows, start, stop)
            raw = self._unpermute(raw, source, stop - start)
            found = RawRows(info.dtype, raw, stop - start, source.cols)
        elif isinstance(info, QuantizedInfo):
            codes = read_codes(self.checkpoint, info)
            found = CodedRows(info.dtype, codes, named=source.named, ordered=source.ordered)
        else:
            shape = (source.rows, source.cols)
            stored = shape if picked is None else picked.stored_shape(shape)
            raw = self._unpermute(self.checkpoint.read(info.name), source, source.rows)
            found = RawRows(info.dtype, raw, *stored)
        return found if picked is None else pick_head_rows(found, picked)

    def pack_matrix(
        self,
        source: Source,
        stored: StoredRows,
        out: Tensor,
        errors: ErrorSum | None = None,
        *,
        rows: int | None = None,
    ) -> None:
        """Pack what ``read_matrix`` gave, of so many ``rows`` if not of all, into ``out``, uint8
        [packed bytes].
        """
        if source.format is None:
            raise ValueError(f"{source.spec.key} is a vector")
        importance = self._importance(source.spec.key, stored)
        shape = (source.rows if rows is None else rows, source.cols)
        self._pack(source.format, source.info.name, stored, shape, importance, errors, out)

    def read_expert(self, source: ExpertsSource, index: int) -> list[StoredRows]:
        """One expert's gate, up and down as the checkpoint stores them; may run beside packing."""
        read: dict[str, Tensor | Codes] = {}

        def stored(part: Part) -> Tensor | Codes:
            info = part.info(index)
            if info.name not in read:
                read[info.name] = self._read_expert(info, index if part.stacked else None)
            return read[info.name]

        gate, up, down = source.parts
        last = _stored_rows(stored(down), down, index)
        channels = last.order if isinstance(last, CodedRows) else None
        rows = [_stored_rows(stored(part), part, index, channels) for part in (gate, up)]
        return [*rows, last]

    def pack_expert(
        self,
        source: ExpertsSource,
        index: int,
        stored: Sequence[StoredRows],
        blob: Tensor,
        errors: ErrorSum | None = None,
    ) -> None:
        """Pack what ``read_expert`` gave into a blob whose bytes between the parts are zero."""
        layout = source.layout
        for which, (part, found) in enumerate(zip(source.parts, stored, strict=True)):
            start, stop = layout.part_range(which)
            self.pack_projection(
                source, index, which, found, blob[start:stop], errors, rows=part.rows
            )

    def read_projection(
        self, source: ExpertsSource, index: int, which: int, rows: tuple[int, int]
    ) -> StoredRows:
        """Output channels [start, stop) of gate (0), up (1) or down (2) of one expert whose tensors
        hold them row by row; may run beside packing.
        """
        part, (start, stop) = source.parts[which], rows
        info, fused, tensor_rows = part.info(index), part.channels.start or 0, part.tensor_rows
        first = fused + (index * tensor_rows if part.stacked else 0)
        all_rows = tensor_rows * (source.num_experts if part.stacked else 1)
        raw = self._read_rows(info, all_rows, first + start, first + stop)
        return RawRows(info.dtype, raw, stop - start, part.cols)

    def pack_projection(
        self,
        source: ExpertsSource,
        index: int,
        which: int,
        stored: StoredRows,
        out: Tensor,
        errors: ErrorSum | None = None,
        *,
        rows: int,
    ) -> None:
        """Pack ``rows`` output channels that were read into ``out``, uint8 [packed bytes]."""
        part = source.parts[which]
        key = f"{source.spec.key}.{PROJECTION_NAMES[which]}"
        importance = self._importance(key, stored, index)
        shape = (rows, part.cols)
        self._pack(part.format, part.info(index).name, stored, shape, importance, errors, out)

    def load_expert(self, source: ExpertsSource, index: int, blob: Tensor) -> None:
        """Read and pack one expert in the calling thread; for ``packs_alone`` sources, of which
        several threads load one each.
        """
        layout = source.layout
        stored = self.read_expert(source, index)
        for which, (part, rows) in enumerate(zip(source.parts, stored, strict=True)):
            start, stop = layout.part_range(which)
            with self._naming(part.info(index).name):
                rows.pack(part.format, 0, part.rows, blob[start:stop], alone=True)

    def packs_alone(self, source: ExpertsSource) -> bool:
        """Every part is only repacked, by the native packers."""
        infos = [(part, info) for part in source.parts for info in part.infos]
        return not self.measure and all(
            not isinstance(info, QuantizedInfo)
            and not part.transposed
            and info.dtype in part.format.exact_from
            and part.format.packs_natively(info.dtype)
            for part, info in infos
        )

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Errors inside name the file and the tensor."""
        try:
            yield
        except (CheckpointError, UnsupportedFormat) as error:
            raise type(error)(f"{self.checkpoint.path}: {name}: {error}") from error

    def _importance(self, key: str, rows: StoredRows, index: int = 0) -> Tensor | None:
        """float32 [K] in the order of the columns."""
        found = self.importance.get(key)
        if found is not None and found.dim() == 2:
            found = found[index]
        return rows.arranged(found) if isinstance(rows, CodedRows) else found

    def _read_rows(self, info: TensorInfo, rows: int, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor that is ``rows`` of them, one after the other."""
        row_nbytes = info.nbytes // rows
        nbytes = (stop - start) * row_nbytes
        return self.checkpoint.read_range(info.name, start * row_nbytes, nbytes)

    def _read_expert(self, info: TensorInfo, index: int | None) -> Tensor | Codes:
        """One expert's part of a tensor; ``index`` None: all of it."""
        if isinstance(info, QuantizedInfo):
            return read_codes(self.checkpoint, info, index)
        return self.checkpoint.read(info.name, None if index is None else (index, index + 1))

    def _pack(
        self,
        format_: Format,
        name: str,
        source: StoredRows,
        shape: tuple[int, int],
        importance: Tensor | None,
        errors: ErrorSum | None,
        out: Tensor,
    ) -> None:
        """On all cores: at once where the native packers read the source as it is, else slab by
        slab of rows, so that no float copy of a big matrix exists.
        """
        rows, cols = shape
        step = max(LANES, _SLAB_ELEMENTS // max(cols, 1) // LANES * LANES)
        block_nbytes = format_.nbytes(LANES, cols)

        def pack_slab(start: int) -> ErrorSum:
            stop = min(start + step, rows)
            first, end = start // LANES * block_nbytes, -(-stop // LANES) * block_nbytes
            return self._pack_rows(format_, source, start, stop, importance, out[first:end])

        with self._naming(name):
            if source.at_once(format_):
                losses = [self._pack_rows(format_, source, 0, rows, importance, out)]
            else:
                losses = list(self._pool.map(pack_slab, range(0, rows, step)))
        if errors is not None:
            errors.error += sum(lost.error for lost in losses)
            errors.norm += sum(lost.norm for lost in losses)

    def _pack_rows(
        self,
        format_: Format,
        source: StoredRows,
        start: int,
        stop: int,
        importance: Tensor | None,
        out: Tensor,
    ) -> ErrorSum:
        if source.exact(format_):
            source.pack(format_, start, stop, out)
            return ErrorSum()
        values = source.floats(start, stop)
        if not self.measure:
            format_.pack(values, importance=importance, out=out)
            return ErrorSum()
        _, error, norm = format_.pack_measured(values, importance=importance, out=out)
        return ErrorSum(error=error, norm=norm)

    def rows_together(self, source: Source) -> int:
        """Output channels that have to be read together: those of a head where they are permuted.

        Raises CheckpointError where heads do not divide the rows.
        """
        heads = source.spec.unpermute_heads
        if not heads or not self._gguf:
            return 1
        rows = source.spec.shape[0]
        if rows % (2 * heads):
            raise CheckpointError(
                f"{self.checkpoint.path}: {source.info.name} has {rows} rows, which do not divide "
                f"into {heads} heads of two halves; the head counts in its metadata are wrong"
            )
        return rows // heads

    def _unpermute(self, raw: Tensor, source: Source, rows: int) -> Tensor:
        """Bring rows that GGUF stores interleaved back to the order of the original model.

        llama.cpp's converters turn the rows of each head from (half, i) into (i, half) order for
        q and k of llama-family models. Rows move whole, so this is exact for quantized blocks too.
        """
        together = self.rows_together(source)
        if together == 1:
            return raw
        pairs = raw.view(rows // together, together // 2, 2, raw.numel() // rows)
        return pairs.transpose(1, 2).reshape(-1)


def _stored_rows(
    stored: Tensor | Codes, part: Part, expert: int, channels: Tensor | None = None
) -> StoredRows:
    """The rows of this projection among those fused in one tensor; ``channels``: int64 [rows], the
    order in which they are wanted.
    """
    info = part.info(expert)
    if isinstance(stored, Codes):
        codes = stored.rows(part.channels)
        codes = codes if channels is None else codes.rows(channels)
        return CodedRows(info.dtype, codes, named=part.named, ordered=part.ordered(expert))
    index, count = part.fused
    if part.transposed:
        return TransposedRows(info.dtype, stored, part.cols, index=index, count=count)
    size = stored.numel() // count
    return RawRows(info.dtype, stored[index * size : (index + 1) * size], part.rows, part.cols)

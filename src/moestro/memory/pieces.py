"""What a conversion holds at a time: a weight or an expert, or some output channels of a large one.

Packed blocks of output channels lie one after the other, so pieces packed alone and written in
order are the packed weight. Only what is not stored row by row is packed whole, whatever its size:
matrices that a quantized checkpoint keeps in several tensors or that are rows of heads among
others, and experts like these or transposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moestro.checkpoints.quantized import QuantizedInfo
from moestro.formats.base import LANES, Format
from moestro.memory.packing import ErrorSum, Packer
from moestro.memory.read_ahead import Read, read_ahead
from moestro.memory.sources import ExpertsSource, Resolved, Source
from moestro.memory.stored_rows import StoredRows

#: bytes of the checkpoint or packed, whichever are more, that a piece has at most if its rows are
#: not longer
PIECE_NBYTES = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The next ``packed_nbytes`` of weight ``key`` in its file.

    nbytes: of the checkpoint. read: gets them; may run beside other pieces. pack: turns what was
    read into ``out``, uint8 [packed_nbytes], and adds up the errors.
    """

    key: str
    nbytes: int
    packed_nbytes: int
    read: Callable[[], Any]
    pack: Callable[[Any, Tensor, ErrorSum], None]


def pieces(packer: Packer, source: Resolved) -> Iterator[Piece]:
    """All pieces of a vector, a matrix or a layer's experts, in the order of the file."""
    if isinstance(source, ExpertsSource):
        for index in range(source.num_experts):
            yield from _of_expert(packer, source, index)
    elif source.format is None:
        yield _vector(packer, source)
    else:
        yield from _of_matrix(packer, source, source.format)


def read_pieces(
    packer: Packer, sources: Iterable[Resolved]
) -> Generator[tuple[Piece, Any], None, None]:
    """All pieces in order with what was read of each, while the next ones are read. Whoever stops
    early closes it.
    """
    reads = (
        Read(nbytes=piece.nbytes, run=partial(_read, piece))
        for source in sources
        for piece in pieces(packer, source)
    )
    return read_ahead(reads, ahead_nbytes=2 * PIECE_NBYTES)


def _read(piece: Piece) -> tuple[Piece, Any]:
    return piece, piece.read()


def packed_nbytes(source: Resolved) -> int:
    """Bytes of all pieces together."""
    if isinstance(source, ExpertsSource):
        return source.num_experts * source.layout.nbytes
    if source.format is None:
        return 4 * math.prod(source.spec.shape)
    return source.format.nbytes(source.rows, source.cols)


def _vector(packer: Packer, source: Source) -> Piece:
    def pack(values: Tensor, out: Tensor, errors: ErrorSum) -> None:
        out.copy_(values.view(-1).view(torch.uint8))

    return Piece(
        key=source.spec.key,
        nbytes=source.source_nbytes,
        packed_nbytes=packed_nbytes(source),
        read=lambda: packer.vector(source),
        pack=pack,
    )


def _of_matrix(packer: Packer, source: Source, format_: Format) -> Iterator[Piece]:
    whole = isinstance(source.info, QuantizedInfo) or source.head_rows is not None
    unit = math.lcm(LANES, packer.rows_together(source))
    steps = _cut(source.rows, source.cols, source.source_nbytes, format_, unit)
    for start, stop in [(0, source.rows)] if whole else steps:
        yield Piece(
            key=source.spec.key,
            nbytes=source.source_nbytes * (stop - start) // source.rows,
            packed_nbytes=format_.nbytes(stop - start, source.cols),
            read=partial(packer.read_matrix, source, None if whole else (start, stop)),
            pack=partial(packer.pack_matrix, source, rows=stop - start),
        )


def _of_expert(packer: Packer, source: ExpertsSource, index: int) -> Iterator[Piece]:
    nbytes, layout = source.source_nbytes // source.num_experts, source.layout
    by_rows = not any(
        part.transposed or isinstance(info, QuantizedInfo)
        for part in source.parts
        for info in part.infos
    )
    if by_rows and max(nbytes, layout.nbytes) > PIECE_NBYTES:
        for which in range(len(source.parts)):
            yield from _of_projection(packer, source, index, which)
        return

    def pack(stored: Any, blob: Tensor, errors: ErrorSum) -> None:
        layout.zero_gaps(blob)
        packer.pack_expert(source, index, stored, blob, errors)

    yield Piece(
        key=source.spec.key,
        nbytes=nbytes,
        packed_nbytes=layout.nbytes,
        read=lambda: packer.read_expert(source, index),
        pack=pack,
    )


def _of_projection(
    packer: Packer, source: ExpertsSource, index: int, which: int
) -> Iterator[Piece]:
    """Gate, up or down of an expert; the last piece has the zeros up to what follows."""
    part, layout = source.parts[which], source.layout
    stored = part.info(index).nbytes * part.rows // part.tensor_rows
    nbytes = stored // source.num_experts if part.stacked else stored
    end = layout.part_range(which)[1]
    following = layout.part_range(which + 1)[0] if which + 1 < len(source.parts) else layout.nbytes
    for start, stop in _cut(part.rows, part.cols, nbytes, part.format, LANES):
        used, rows = part.format.nbytes(stop - start, part.cols), stop - start

        def pack(
            stored: StoredRows, out: Tensor, errors: ErrorSum, used: int = used, rows: int = rows
        ) -> None:
            out[used:] = 0
            packer.pack_projection(source, index, which, stored, out[:used], errors, rows=rows)

        yield Piece(
            key=source.spec.key,
            nbytes=nbytes * rows // part.rows,
            packed_nbytes=used + (following - end if stop == part.rows else 0),
            read=partial(packer.read_projection, source, index, which, (start, stop)),
            pack=pack,
        )


def _cut(
    rows: int, cols: int, nbytes: int, format_: Format, unit: int
) -> Iterator[tuple[int, int]]:
    """Ranges of output channels, all but the last one multiples of ``unit``."""
    block_nbytes = max(-(-nbytes * unit // rows), format_.nbytes(unit, cols))
    step = max(1, PIECE_NBYTES // block_nbytes) * unit
    for start in range(0, rows, step):
        yield start, min(start + step, rows)

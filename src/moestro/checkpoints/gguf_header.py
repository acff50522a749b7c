"""Owns the parsing of one GGUF file's header: metadata, tensor table, and every check on both.

Layout (GGUF specification, versions 2 and 3, little endian): magic, version u32, tensor count u64,
key/value count u64, key/values, tensor infos, padding to ``general.alignment``, data. No count or
length is believed: each is compared with the bytes that are left before anything is allocated, so
what a header can make us allocate is a small multiple of its own size.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from moestro.checkpoints.base import TensorInfo
from moestro.checkpoints.files import ByteSource, show
from moestro.checkpoints.gguf_types import REMOVED, TYPES
from moestro.checkpoints.table import check_disjoint
from moestro.core.errors import CheckpointError, UnsupportedFormat
from moestro.core.units import format_bytes

MAGIC = b"GGUF"
#: Largest header read. The biggest vocabularies in use make headers of some 20 MB.
MAX_HEADER_NBYTES = 128 << 20
_WINDOW = 1 << 18
_MAX_DIMS = 4  # GGML_MAX_DIMS
_MAX_NESTING = 8

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4",
    _BOOL: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
# The fewest bytes one item takes: what bounds a count before it is believed.
_MIN_STRING, _MIN_ARRAY, _MIN_KEY_VALUE, _MIN_TENSOR = 8, 12, 13, 24

_u32 = struct.Struct("<I")
_u64 = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class Header:
    """What one file declares. ``infos`` are in disk order; their ranges lie inside the file."""

    version: int
    metadata: dict[str, Any]
    infos: dict[str, TensorInfo]


class _Cursor:
    """Reads forward through a source by windows, and refuses to pass its end."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.end = min(source.size, MAX_HEADER_NBYTES)
        self._window = b""
        self._start = 0  # file offset of the window
        self.pos = 0

    @property
    def left(self) -> int:
        return self.end - self.pos

    def need(self, nbytes: int, what: str) -> None:
        """Raise CheckpointError unless ``nbytes`` more bytes can be header."""
        if nbytes > self.left:
            limit = (
                f"the file ends at {self.end}"
                if self.end == self.source.size
                else f"headers beyond {format_bytes(MAX_HEADER_NBYTES)} are not read"
            )
            raise CheckpointError(
                f"{self.source.path}: {what} at byte {self.pos} needs {nbytes} bytes, but {limit}; "
                "the file is truncated or corrupt, fetch it again"
            )

    def take(self, nbytes: int, what: str) -> bytes:
        self.need(nbytes, what)
        at = self.pos - self._start
        if at + nbytes > len(self._window):
            self._window = self.source.pread(self.pos, min(self.left, max(nbytes, _WINDOW)))
            self._start, at = self.pos, 0
        self.pos += nbytes
        return self._window[at : at + nbytes]

    def u32(self, what: str) -> int:
        return int(_u32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_u64.unpack(self.take(8, what))[0])

    def string(self, what: str) -> str:
        start = self.pos
        raw = self.take(self.u64(f"the length of {what}"), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(
                f"{self.source.path}: {what} at byte {start} is not UTF-8; the file is corrupt"
            ) from None

    def strings(self, count: int, what: str) -> list[str]:
        """``count`` strings; the common case (in the window, valid) without a call per string."""
        out: list[str] = []
        length_at = _u64.unpack_from
        while len(out) < count:
            window, base = self._window, self._start
            at, stop = self.pos - base, len(window)
            try:
                for _ in range(count - len(out)):
                    begin = at + 8
                    if begin > stop or (end := begin + length_at(window, at)[0]) > stop:
                        break
                    out.append(window[begin:end].decode("utf-8"))
                    at = end
            except UnicodeDecodeError:
                pass  # string() below meets it again and says where
            self.pos = base + at
            if len(out) < count:
                out.append(self.string(what))
        return out


def parse(source: ByteSource) -> Header:
    """Parse and check the header of one GGUF file.

    Raises CheckpointError when it is truncated, corrupt or inconsistent, and UnsupportedFormat for
    other versions, big-endian files and unknown tensor types.
    """
    cursor = _Cursor(source)
    if cursor.take(min(4, source.size), "the magic") != MAGIC:
        raise CheckpointError(f"{source.path} is not a GGUF file: it does not begin with GGUF")
    version = _version(cursor)
    tensor_count = cursor.u64("the tensor count")
    pair_count = cursor.u64("the metadata count")
    cursor.need(pair_count * _MIN_KEY_VALUE, f"metadata of {pair_count} entries")
    metadata: dict[str, Any] = {}
    for i in range(pair_count):
        key = cursor.string(f"metadata key {i}")
        if key in metadata:
            raise CheckpointError(
                f"{source.path}: metadata key {show(key)} occurs twice; the file is corrupt"
            )
        what = f"metadata {show(key)}"
        metadata[key] = _value(cursor, cursor.u32(f"the type of {what}"), what, 0)
    cursor.need(tensor_count * _MIN_TENSOR, f"a table of {tensor_count} tensors")
    infos = _tensors(cursor, tensor_count, _alignment(metadata, source))
    return Header(version=version, metadata=metadata, infos=infos)


def _version(cursor: _Cursor) -> int:
    raw = cursor.take(4, "the version")
    version = int.from_bytes(raw, "little")
    if version in (2, 3):
        return version
    path = cursor.source.path
    if int.from_bytes(raw, "big") in (1, 2, 3):
        raise UnsupportedFormat(
            f"{path} is a big-endian GGUF file, only little-endian ones are read; the gguf package "
            f"turns it round in place: gguf-convert-endian {path} little"
        )
    raise UnsupportedFormat(
        f"{path} is a GGUF file of version {version}, versions 2 and 3 are read; convert the model "
        "again with a current converter"
    )


def _value(cursor: _Cursor, kind: int, what: str, depth: int) -> Any:
    if kind == _STRING:
        return cursor.string(what)
    if kind == _ARRAY:
        return _array(cursor, what, depth)
    return _scalars(cursor, kind, 1, what)[0]


def _array(cursor: _Cursor, what: str, depth: int) -> list[Any]:
    if depth == _MAX_NESTING:
        raise CheckpointError(
            f"{cursor.source.path}: {what} nests arrays more than {_MAX_NESTING} deep; the file is "
            "corrupt"
        )
    kind = cursor.u32(f"the item type of {what}")
    count = cursor.u64(f"the length of {what}")
    if kind == _STRING:
        cursor.need(count * _MIN_STRING, f"{what} with {count} strings")
        return cursor.strings(count, what)
    if kind == _ARRAY:
        cursor.need(count * _MIN_ARRAY, f"{what} with {count} arrays")
        return [_array(cursor, what, depth + 1) for _ in range(count)]
    return _scalars(cursor, kind, count, what)


def _scalars(cursor: _Cursor, kind: int, count: int, what: str) -> list[Any]:
    if kind not in _SCALARS:
        raise CheckpointError(
            f"{cursor.source.path}: {what} has value type {kind}, which GGUF does not define; the "
            "file is corrupt or newer than this reader"
        )
    dtype = np.dtype(_SCALARS[kind])
    values = np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype=dtype)
    if kind != _BOOL:
        return list(values.tolist())
    if count and values.max() > 1:
        raise CheckpointError(
            f"{cursor.source.path}: {what} holds a boolean that is neither 0 nor 1; the file is "
            "corrupt"
        )
    return list(values.astype(bool).tolist())


def _alignment(metadata: dict[str, Any], source: ByteSource) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or value <= 0 or value & (value - 1):
        raise CheckpointError(
            f"{source.path}: general.alignment is {show(value)}, not a power of two; the file "
            "is corrupt"
        )
    return value


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    """The tensor table, with offsets made absolute and checked."""
    relative: dict[str, TensorInfo] = {}
    for i in range(count):
        info = _tensor(cursor, i)
        if info.name in relative:
            raise CheckpointError(
                f"{cursor.source.path}: tensor {show(info.name)} occurs twice; the file is corrupt"
            )
        relative[info.name] = info
    data_start = -(-cursor.pos // alignment) * alignment
    infos = [_place(info, data_start, alignment, cursor.source) for info in relative.values()]
    check_disjoint(infos, cursor.source.path)
    return {info.name: info for info in sorted(infos, key=lambda info: info.offset)}


def _tensor(cursor: _Cursor, index: int) -> TensorInfo:
    name = cursor.string(f"the name of tensor {index}")
    what = f"tensor {show(name)}"
    path = cursor.source.path
    dims = cursor.u32(f"the rank of {what}")
    if dims > _MAX_DIMS:
        raise CheckpointError(
            f"{path}: {what} has {dims} dimensions, GGUF allows {_MAX_DIMS}; the file is corrupt"
        )
    # The fastest-varying dimension comes first in the file.
    ne = [cursor.u64(f"the shape of {what}") for _ in range(dims)]
    if any(n >= 1 << 63 for n in ne):
        raise CheckpointError(f"{path}: {what} has the absurd shape {ne}; the file is corrupt")
    number = cursor.u32(f"the type of {what}")
    offset = cursor.u64(f"the offset of {what}")
    if number in REMOVED:
        raise UnsupportedFormat(
            f"{path}: {what} has type {REMOVED[number]} ({number}), which GGUF has dropped; "
            "quantize the model again from its float weights"
        )
    if number not in TYPES:
        raise UnsupportedFormat(
            f"{path}: {what} has type number {number}, which is not known here; the file is "
            "corrupt, or the type is newer than this version of Moestro"
        )
    kind = TYPES[number]
    row = ne[0] if ne else 1
    if row % kind.block:
        raise CheckpointError(
            f"{path}: {what} has rows of {row} elements, but {kind.name} comes in blocks of "
            f"{kind.block}; the file is corrupt"
        )
    return TensorInfo(
        name=name,
        shape=tuple(reversed(ne)),
        dtype=kind.name,
        file=path,
        offset=offset,
        nbytes=math.prod(ne) // kind.block * kind.nbytes,
    )


def _place(info: TensorInfo, start: int, alignment: int, source: ByteSource) -> TensorInfo:
    if info.offset % alignment:
        raise CheckpointError(
            f"{source.path}: tensor {show(info.name)} lies at offset {info.offset}, not a multiple "
            f"of the alignment {alignment}; the file is corrupt"
        )
    offset = start + info.offset
    if offset + info.nbytes > source.size:
        raise CheckpointError(
            f"{source.path}: tensor {show(info.name)} {list(info.shape)} {info.dtype} takes bytes "
            f"{offset} to {offset + info.nbytes}, but the file ends at {source.size}; it is "
            "truncated, fetch it again"
        )
    return TensorInfo(
        name=info.name,
        shape=info.shape,
        dtype=info.dtype,
        file=info.file,
        offset=offset,
        nbytes=info.nbytes,
    )

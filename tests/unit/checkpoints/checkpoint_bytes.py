"""Builders of small GGUF and safetensors files for these tests, byte by byte, so that each field
can be made wrong."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    """One metadata entry of a value type number and its encoded value."""
    return string(key) + u32(kind) + value


def tensor(name: str, ne: list[int], kind: int, offset: int) -> bytes:
    """One entry of the tensor table; ``ne`` fastest dimension first, as in the file."""
    return string(name) + u32(len(ne)) + b"".join(map(u64, ne)) + u32(kind) + u64(offset)


ARCHITECTURE = pair("general.architecture", 8, string("llama"))


def gguf(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    version: bytes = u32(3),
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file; ``counts`` overrides the declared (tensors, metadata) counts."""
    pairs = [ARCHITECTURE] if pairs is None else pairs
    tensors = tensors or []
    declared = counts or (len(tensors), len(pairs))
    head = b"GGUF" + version + u64(declared[0]) + u64(declared[1])
    head += b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def safetensors(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file of a header given as JSON value or as bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return u64(len(raw) if length is None else length) + raw + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@dataclass
class Memory:
    """A byte source that fails the test when a parser asks for more than there is."""

    data: bytes
    path: Path = Path("memory")
    total: int = 0

    @property
    def size(self) -> int:
        return len(self.data)

    def pread(self, offset: int, nbytes: int) -> bytes:
        assert offset >= 0 and nbytes >= 0 and offset + nbytes <= self.size, (offset, nbytes)
        self.total += nbytes
        return self.data[offset : offset + nbytes]

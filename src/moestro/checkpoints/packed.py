"""Owns packed models, the directories that ``moestro convert`` writes: moestro.json and its files.

moestro.json names every weight with its format, shape and byte range, and every file with its size
and checksum; it is written last, so a directory that has one is complete. Bytes are in the layout
that kernels read: loading is reading.

    moestro.json        the manifest below
    config.json         the source's config.json, or the metadata of its GGUF file
    shared.safetensors  everything but experts: vectors as F32, packed matrices as U8
    experts-LLL.bin     one layer's experts, equal blobs ``gate | up | down``, each 4096-aligned;
                        a layer's shared expert is in experts-LLL-shared.bin
    tokenizer files     as they were beside the source
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from moestro.checkpoints.base import Checkpoint, TensorInfo
from moestro.checkpoints.files import SourceFile, read_json, show
from moestro.checkpoints.table import TensorTable, check_disjoint, require_range
from moestro.core.errors import CheckpointError, InvalidRequest, UnsupportedFormat

MANIFEST_NAME = "moestro.json"
CONFIG_NAME = "config.json"
SHARED_NAME = "shared.safetensors"
FORMAT_VERSION = 1

_KINDS = ("vector", "matrix", "experts")
_CONTAINERS = ("safetensors", "gguf")
_HASH_STEP = 1 << 24


@dataclass(frozen=True, kw_only=True)
class PackedPart:
    """One of gate, up and down in each expert's blob."""

    format_name: str
    rows: int
    cols: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class PackedEntry:
    """One weight of a packed model.

    shape: of the model's weight: (N,), (N, K) or (E, intermediate_size, hidden_size).
    format_name: of a matrix; empty for vectors (float32) and experts (see parts). blob_nbytes and
    parts (gate, up, down): of experts. relative_error: root of squared error over squared norm
    against the source, 0 when nothing was lost.
    """

    kind: str
    shape: tuple[int, ...]
    info: TensorInfo
    format_name: str = ""
    blob_nbytes: int = 0
    parts: tuple[PackedPart, ...] = ()
    relative_error: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PackedFile:
    """Size and BLAKE2b-128 checksum (hex) of a file, as recorded when it was written."""

    nbytes: int
    digest: str


class PackedCheckpoint(TensorTable):
    """A packed model. Tensor names are the model's own keys.

    ``config`` and ``architecture`` are those of the source, and ``config_container`` says which
    kind of container they come from (``safetensors`` or ``gguf``), so the model is described from
    them exactly as from the source.
    """

    container = "packed"

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        manifest: Manifest,
        files: Iterable[SourceFile],
    ) -> None:
        infos = {key: entry.info for key, entry in manifest.entries.items()}
        super().__init__(path, config, infos, files)
        self.manifest = manifest

    @classmethod
    def open(cls, path: Path) -> PackedCheckpoint:
        """Open a packed directory and check the manifest against the files' sizes.

        Raises CheckpointError for anything missing, cut or inconsistent, UnsupportedFormat for a
        directory written by a newer version.
        """
        manifest = read_manifest(path)
        files: list[SourceFile] = []
        try:
            for name, declared in manifest.files.items():
                file = SourceFile(path / name)
                files.append(file)
                if file.size != declared.nbytes:
                    raise CheckpointError(
                        f"{file.path} has {file.size} bytes, {MANIFEST_NAME} says "
                        f"{declared.nbytes}; the copy is incomplete, copy or convert it again"
                    )
            config = read_json(path / CONFIG_NAME)
        except BaseException:
            for file in files:
                file.close()
            raise
        return cls(path, config, manifest, files)

    @property
    def architecture(self) -> str:
        return self.manifest.architecture

    @property
    def config_container(self) -> str:
        """``safetensors`` if config is a config.json, ``gguf`` if it is GGUF metadata."""
        return self.manifest.config_container

    def entry(self, key: str) -> PackedEntry:
        """The manifest's entry of a weight. Raises CheckpointError if there is none."""
        self.info(key)
        return self.manifest.entries[key]

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """All bytes of a weight, or the blobs of experts [start, stop). Rows of a matrix lie in
        tiles and cannot be read alone (InvalidRequest).
        """
        if rows is not None and self.entry(name).kind != "experts":
            raise InvalidRequest(f"{name} is packed in tiles; read it whole")
        return super().read(name, rows)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill ``out`` (uint8, 1-D, contiguous) with a weight's bytes from ``start`` on. Raises
        InvalidRequest if the weight ends before, CheckpointError for a file that fails. Safe from
        several threads.
        """
        info = self.info(name)
        require_range(info, start, out.numel())
        self._files[info.file].read_into(info.offset + start, out)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read every file and compare its checksum. Raises CheckpointError naming the first that
        differs. ``progress(done, total)`` counts bytes.
        """
        total = sum(file.nbytes for file in self.manifest.files.values())
        done = 0
        for name, declared in self.manifest.files.items():
            found = file_digest(self.path / name)
            if found != declared.digest:
                raise CheckpointError(
                    f"{self.path / name} is damaged: its checksum is {found}, not "
                    f"{declared.digest}; copy or convert the model again"
                )
            done += declared.nbytes
            if progress:
                progress(done, total)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """moestro.json, checked. ``source`` and ``fingerprint`` say what it was made from and how."""

    architecture: str
    config_container: str
    entries: Mapping[str, PackedEntry]
    files: Mapping[str, PackedFile]
    source: Mapping[str, Any]
    fingerprint: str


def new_digest() -> hashlib.blake2b:
    """The checksum of all files of a packed model."""
    return hashlib.blake2b(digest_size=16)


def file_digest(path: Path, *, once: bool = False) -> str:
    """Checksum of a file's bytes, hex. once: leave none of them in the page cache. Raises
    CheckpointError.
    """
    source = SourceFile(path)
    if once:
        source.read_once(in_order=True)
    digest = new_digest()
    try:
        for start in range(0, source.size, _HASH_STEP):
            step = min(_HASH_STEP, source.size - start)
            digest.update(source.read_tensor(start, step).numpy().data)
    finally:
        source.close()
    return digest.hexdigest()


def source_digest(source: Checkpoint) -> str:
    """BLAKE2b-128 (hex) over the configuration and every tensor's name, type, shape and place."""
    digest = new_digest()
    digest.update(json.dumps(dict(source.config), sort_keys=True).encode())
    for name in sorted(source.names()):
        info = source.info(name)
        row = [name, info.dtype, list(info.shape), info.file.name, info.offset, info.nbytes]
        digest.update(json.dumps(row).encode())
    return digest.hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Parse and check moestro.json without looking at the other files."""
    where = directory / MANIFEST_NAME
    raw = read_json(where, strict=True)
    version = raw.get("format_version")
    if version != FORMAT_VERSION:
        if type(version) is int and version > FORMAT_VERSION:
            raise UnsupportedFormat(
                f"{where} has format version {version}, this Moestro reads {FORMAT_VERSION}; "
                "update Moestro or convert the model again"
            )
        raise CheckpointError(f"{where} has no usable format_version ({show(str(version))})")
    reader = _Reader(where)
    files = {
        reader.file_name(name): PackedFile(
            nbytes=reader.count(entry, "nbytes"), digest=reader.text(entry, "digest")
        )
        for name, entry in reader.table(raw, "files").items()
    }
    entries = {
        key: reader.entry(key, entry, files) for key, entry in reader.table(raw, "weights").items()
    }
    if CONFIG_NAME not in files:
        raise CheckpointError(f"{where} does not list {CONFIG_NAME}; convert the model again")
    for name in files:
        check_disjoint([e.info for e in entries.values() if e.info.file.name == name], where)
    container = reader.text(raw, "config_container")
    if container not in _CONTAINERS:
        raise CheckpointError(f"{where}: config_container is {show(container)}; it is corrupt")
    return Manifest(
        architecture=reader.text(raw, "architecture"),
        config_container=container,
        entries=entries,
        files=files,
        source=reader.table(raw, "source"),
        fingerprint=reader.text(raw, "fingerprint"),
    )


class _Reader:
    """Typed access to the manifest; every surprise is a CheckpointError naming the file."""

    def __init__(self, where: Path) -> None:
        self.where = where

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {what}; it is corrupt, convert the model again")

    def table(self, raw: Any, key: str) -> dict[str, Any]:
        value = raw.get(key) if isinstance(raw, dict) else None
        if not isinstance(value, dict):
            raise self.fail(f"{key} is not an object")
        return value

    def text(self, raw: Any, key: str) -> str:
        value = raw.get(key) if isinstance(raw, dict) else None
        if not isinstance(value, str):
            raise self.fail(f"{key} is not a string")
        return value

    def count(self, raw: Any, key: str) -> int:
        value = raw.get(key) if isinstance(raw, dict) else None
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise self.fail(f"{key} is not a count")
        return value

    def file_name(self, name: str) -> str:
        if name in ("", ".", "..", MANIFEST_NAME) or any(c in name for c in "/\\\0"):
            raise self.fail(f"{show(name)} is not a plain file name")
        return name

    def shape(self, raw: Any) -> tuple[int, ...]:
        value = raw.get("shape") if isinstance(raw, dict) else None
        if not isinstance(value, list) or not all(type(n) is int and n > 0 for n in value):
            raise self.fail("shape is not a list of positive counts")
        return tuple(value)

    def entry(self, key: str, raw: Any, files: Mapping[str, PackedFile]) -> PackedEntry:
        kind = self.text(raw, "kind")
        if kind not in _KINDS:
            raise self.fail(f"weight {show(key)} is of unknown kind {show(kind)}")
        shape, file = self.shape(raw), self.text(raw, "file")
        offset, nbytes = self.count(raw, "offset"), self.count(raw, "nbytes")
        if file not in files:
            raise self.fail(f"weight {show(key)} is in {show(file)}, which is not listed")
        if offset + nbytes > files[file].nbytes:
            raise self.fail(
                f"weight {show(key)} ends at byte {offset + nbytes} of {file}, which has "
                f"{files[file].nbytes}"
            )
        error = raw.get("relative_error", 0.0)
        if not isinstance(error, int | float):
            raise self.fail(f"the relative_error of {show(key)} is not a number")
        stored, dtype, format_name, blob = shape, "F32", "", 0
        parts: tuple[PackedPart, ...] = ()
        if kind == "matrix":
            dtype = format_name = self.text(raw, "format")
            if len(shape) != 2:
                raise self.fail(f"matrix {show(key)} has the shape {list(shape)}")
        elif kind == "vector":
            if nbytes != 4 * math.prod(shape):
                raise self.fail(f"vector {show(key)} {list(shape)} has {nbytes} bytes")
        else:
            blob, parts = self.blob(key, raw, shape, nbytes)
            stored, dtype = (shape[0], blob), "U8"
        return PackedEntry(
            kind=kind,
            shape=shape,
            info=TensorInfo(
                name=key,
                shape=stored,
                dtype=dtype,
                file=self.where.parent / file,
                offset=offset,
                nbytes=nbytes,
            ),
            format_name=format_name,
            blob_nbytes=blob,
            parts=parts,
            relative_error=float(error),
        )

    def blob(
        self, key: str, raw: Any, shape: tuple[int, ...], nbytes: int
    ) -> tuple[int, tuple[PackedPart, ...]]:
        blob = self.count(raw, "blob_nbytes")
        parts = raw.get("parts")
        if len(shape) != 3 or not blob or blob * shape[0] != nbytes:
            raise self.fail(f"{show(key)}: {shape} experts of {blob} bytes are not {nbytes}")
        if not isinstance(parts, list) or len(parts) != 3:
            raise self.fail(f"{show(key)} does not list its gate, up and down")
        return blob, tuple(
            PackedPart(
                format_name=self.text(part, "format"),
                rows=self.count(part, "rows"),
                cols=self.count(part, "cols"),
                offset=self.count(part, "offset"),
            )
            for part in parts
        )

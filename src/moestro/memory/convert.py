"""Converts a checkpoint into a packed model, layer by layer, in memory of a few pieces."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moestro import devices
from moestro.checkpoints.base import Checkpoint
from moestro.checkpoints.packed import (
    CONFIG_NAME,
    FORMAT_VERSION,
    SHARED_NAME,
    new_digest,
    read_manifest,
    source_digest,
)
from moestro.core.errors import CheckpointError, InvalidRequest, UnsupportedFormat
from moestro.formats.base import packed_buffer
from moestro.memory.input_orders import with_orders
from moestro.memory.packed_writer import PackedWriter, Sink
from moestro.memory.packing import ErrorSum, Importance, Packer
from moestro.memory.pieces import packed_nbytes, read_pieces
from moestro.memory.policy import FormatPolicy
from moestro.memory.sources import ExpertsSource, Resolved, Source, resolve
from moestro.memory.weights import WeightSpec

Progress = Callable[[int, int], None]

#: files beside a Hugging Face checkpoint that a packed model keeps
COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


@dataclass(frozen=True, kw_only=True)
class ConvertedWeight:
    """One line of the report: formats are ``gate/up/down`` for experts, sizes in bytes."""

    key: str
    format: str
    source_nbytes: int
    nbytes: int
    relative_error: float


@dataclass(frozen=True, kw_only=True)
class ConvertReport:
    """What a conversion did. ``resumed``: files that an earlier, interrupted run had finished."""

    out_dir: Path
    weights: tuple[ConvertedWeight, ...]
    resumed: int

    @property
    def source_nbytes(self) -> int:
        return sum(weight.source_nbytes for weight in self.weights)

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)


def convert(
    source: Checkpoint,
    specs: Sequence[WeightSpec],
    out_dir: Path,
    *,
    policy: FormatPolicy | None = None,
    progress: Progress | None = None,
    importance: Importance | None = None,
    write_tokenizer: Callable[[Path], object] | None = None,
) -> ConvertReport:
    """Write a packed model into ``out_dir``, which must be absent or empty.

    policy: formats by role; None quantizes float matrices to the default format and keeps what is
    quantized already. importance: activation second moments by key (see ``packing``).
    write_tokenizer: puts further files into the directory it is given; the tokenizer files beside a
    Hugging Face checkpoint are copied without it. ``progress(done, total)`` counts source bytes.

    An interrupted conversion (killed, disk full) is taken up by calling again with the same
    arguments; finished already, it only reports. Raises CheckpointError and UnsupportedFormat for
    what is wrong with the source (nothing is left behind then), InvalidRequest for an output that
    cannot be used, OutOfBudget when the disk has no room.
    """
    if source.container == "packed":
        raise InvalidRequest(f"{source.path} is packed already; convert the model it was made from")
    devices.get("cpu")  # its thread team packs
    policy = policy or FormatPolicy.for_conversion()
    sources = with_orders(source, resolve(source, specs, policy))
    files = _plan_files(sources)
    writer = PackedWriter(out_dir, _fingerprint(source, sources, importance))
    if writer.already_done():
        return _report(writer, sources, resumed=len(files))
    with writer:
        if writer.already_done():  # an earlier run was stopped just before the last rename
            return _report(writer, sources, resumed=len(files))
        resumed = sum(name in writer.files for name in files)
        try:
            _write_weights(writer, source, files, importance, progress)
            _write_rest(writer, source, write_tokenizer)
            writer.finish(_manifest(writer, source, policy, files))
        except BaseException as error:
            # Nothing finished is nothing to keep; and work on a source that cannot be converted
            # will never be taken up.
            if not writer.files or isinstance(error, CheckpointError | UnsupportedFormat):
                writer.discard()
            raise
    return _report(writer, sources, resumed=resumed)


def _plan_files(sources: Sequence[Resolved]) -> dict[str, list[Source] | ExpertsSource]:
    """File name -> the weights in it: all but experts together, then each layer's banks.

    A layer may have a second bank, its shared expert, which is named by its role.
    """
    shared = [source for source in sources if isinstance(source, Source)]
    files: dict[str, list[Source] | ExpertsSource] = {SHARED_NAME: shared}
    banks = [source for source in sources if isinstance(source, ExpertsSource)]
    for index, bank in enumerate(banks):
        number = bank.spec.layer if bank.spec.layer >= 0 else index
        name = f"experts-{number:03d}.bin"
        if name in files:
            name = f"experts-{number:03d}-{bank.spec.role}.bin"
        if name in files:
            raise ValueError(f"two weights of kind experts and one role have layer {number}")
        files[name] = bank
    return files


def _items(file: list[Source] | ExpertsSource) -> Sequence[Resolved]:
    return file if isinstance(file, list) else [file]


def _write_weights(
    writer: PackedWriter,
    source: Checkpoint,
    files: Mapping[str, list[Source] | ExpertsSource],
    importance: Importance | None,
    progress: Progress | None,
) -> None:
    sizes = {name: sum(item.source_nbytes for item in _items(f)) for name, f in files.items()}
    todo = {name: file for name, file in files.items() if name not in writer.files}
    writer.require_space(sum(packed_nbytes(item) for f in todo.values() for item in _items(f)))
    source.read_once()
    done = sum(sizes[name] for name in files if name not in todo)
    meter = _Meter(progress, done, sum(sizes.values()))
    with Packer(source, importance=importance, measure=True) as packer:
        for name, file in todo.items():
            writer.write(name, partial(_put, packer, file, meter))
            done += sizes[name]
            meter.advance(done - meter.done)  # rounding


class _Meter:
    """Counts source bytes for the caller's progress display. done: by an earlier run."""

    def __init__(self, progress: Progress | None, done: int, total: int) -> None:
        self.progress, self.total, self.done = progress, total, done
        self.advance(0)

    def advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress:
            self.progress(self.done, self.total)


def _put(
    packer: Packer, file: list[Source] | ExpertsSource, meter: _Meter, sink: Sink
) -> dict[str, float]:
    """One file's weights, piece by piece, while the next ones are read; returns the relative errors
    by key.
    """
    if isinstance(file, list):
        sink(_shared_header(file))
    items = _items(file)
    errors = {item.spec.key: ErrorSum() for item in items}
    buffer = packed_buffer(0)
    with closing(read_pieces(packer, items)) as ahead:
        for piece, stored in ahead:
            if buffer.numel() < piece.packed_nbytes:
                buffer = packed_buffer(piece.packed_nbytes)
            packed = buffer[: piece.packed_nbytes]
            piece.pack(stored, packed, errors[piece.key])
            del stored
            sink(packed)
            meter.advance(piece.nbytes)
    return {key: total.relative for key, total in errors.items()}


def _shared_header(items: Sequence[Source]) -> bytes:
    """Header of shared.safetensors: known before any weight is packed, padded so that the data
    starts at a multiple of 64.
    """
    header: dict[str, Any] = {}
    at = 0
    for item in items:
        nbytes = packed_nbytes(item)
        vector = item.format is None
        header[item.spec.key] = {
            "dtype": "F32" if vector else "U8",
            "shape": list(item.spec.shape) if vector else [nbytes],
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text


def _write_rest(
    writer: PackedWriter,
    source: Checkpoint,
    write_tokenizer: Callable[[Path], object] | None,
) -> None:
    """config.json and the tokenizer's files."""
    config = json.dumps(dict(source.config), indent=1, ensure_ascii=False).encode()
    writer.write(CONFIG_NAME, lambda sink: sink(config))
    if source.container == "safetensors":
        writer.write_produced(lambda scratch: _copy_beside(source.path, scratch))
    if write_tokenizer is not None:
        writer.write_produced(write_tokenizer)


def _copy_beside(checkpoint: Path, directory: Path) -> None:
    beside = checkpoint if checkpoint.is_dir() else checkpoint.parent
    for name in COPIED_FILES:
        if (beside / name).is_file():
            shutil.copyfile(beside / name, directory / name)


def _manifest(
    writer: PackedWriter,
    source: Checkpoint,
    policy: FormatPolicy,
    files: Mapping[str, list[Source] | ExpertsSource],
) -> dict[str, Any]:
    weights: dict[str, Any] = {}
    for name, file in files.items():
        at = len(_shared_header(file)) if isinstance(file, list) else 0
        for item in _items(file):
            nbytes = packed_nbytes(item)
            weights[item.spec.key] = {
                "kind": item.spec.kind,
                "shape": list(item.spec.shape),
                "file": name,
                "offset": at,
                "nbytes": nbytes,
                "relative_error": writer.notes[name][item.spec.key],
                **_formats(item),
            }
            at += nbytes
    return {
        "format_version": FORMAT_VERSION,
        "architecture": source.architecture,
        "config_container": source.container,
        "source": {
            "name": source.path.name,
            "container": source.container,
            "digest": source_digest(source),
            "policy": str(policy),
        },
        "weights": weights,
    }


def _formats(item: Resolved) -> dict[str, Any]:
    if isinstance(item, Source):
        return {"format": item.format.name} if item.format else {}
    layout = item.layout
    parts = [
        {"format": p.format_name, "rows": p.rows, "cols": p.cols, "offset": p.offset}
        for p in layout.projections
    ]
    return {"blob_nbytes": layout.nbytes, "parts": parts}


def _fingerprint(
    source: Checkpoint, sources: Sequence[Resolved], importance: Importance | None
) -> str:
    """Identifies source files (by size and time of change too), formats and importance: what must
    be the same for an interrupted conversion to go on.
    """
    digest = new_digest()
    digest.update(source_digest(source).encode())
    for path in sorted({source.info(name).file for name in source.names()}):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    for item in sources:
        row = [item.spec.key, item.spec.kind, item.spec.shape, _formats(item), FORMAT_VERSION]
        digest.update(json.dumps(row).encode())
    for key in sorted(importance or {}):
        digest.update(key.encode())
        values: Tensor = (importance or {})[key]
        digest.update(values.to(torch.float32).contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()


def _report(writer: PackedWriter, sources: Sequence[Resolved], *, resumed: int) -> ConvertReport:
    entries = read_manifest(writer.out_dir).entries
    weights = []
    for item in sources:
        entry = entries[item.spec.key]
        names = [part.format_name for part in entry.parts] or [entry.format_name or "float32"]
        weights.append(
            ConvertedWeight(
                key=item.spec.key,
                format="/".join(dict.fromkeys(names)),
                source_nbytes=item.source_nbytes,
                nbytes=entry.info.nbytes,
                relative_error=entry.relative_error,
            )
        )
    return ConvertReport(out_dir=writer.out_dir, weights=tuple(weights), resumed=resumed)

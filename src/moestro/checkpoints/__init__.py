"""What users have on disk: names, shapes and byte ranges of a model's tensors, read from headers.

``open_checkpoint`` decides by what is there which container it is; each has a file of its own.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import NoReturn

from moestro.checkpoints.base import Checkpoint, TensorInfo
from moestro.checkpoints.files import SourceFile, show
from moestro.checkpoints.gguf import GgufCheckpoint, first_parts
from moestro.checkpoints.gguf_header import MAGIC as _GGUF_MAGIC
from moestro.checkpoints.packed import MANIFEST_NAME, PackedCheckpoint
from moestro.checkpoints.safetensors import (
    INDEX_NAME,
    INDEX_SUFFIX,
    SINGLE_NAME,
    SafetensorsCheckpoint,
)
from moestro.core import env
from moestro.core.errors import CheckpointError, InvalidRequest, UnsupportedFormat

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OTHER = (".h5", ".msgpack", ".onnx", ".npz", ".ot", ".tflite", ".mlmodel")


def open_checkpoint(
    path_or_hub_id: str | os.PathLike[str], *, revision: str | None = None, offline: bool = False
) -> Checkpoint:
    """Open a model: headers only, no weights are read.

    ``path_or_hub_id`` is a directory (packed by ``moestro convert``, or with safetensors or one
    GGUF model), a .safetensors or .gguf file, or a hub id: ``owner/name``, or
    ``owner/name:file.gguf`` for one file of a repository. What exists on disk wins over the hub.
    ``revision`` (branch, tag or commit) is for hub ids. ``offline``, or HF_HUB_OFFLINE, looks only
    into the local hub cache.

    Raises CheckpointError for what is missing, corrupt or ambiguous; UnsupportedFormat for other
    containers and quantizations; InvalidRequest for a revision of a local path.
    """
    text = os.fspath(path_or_hub_id)
    path = Path(os.path.expanduser(text))
    if text and os.path.exists(path):
        if revision is not None:
            raise InvalidRequest(
                f"{path} is on disk, so revision {show(revision)} cannot be chosen; leave it out"
            )
        return _open_path(path)
    # huggingface_hub takes a third of a second to import, so only a hub id pays for it.
    hub = importlib.import_module("moestro.checkpoints.hub")
    if not hub.is_hub_id(text):
        raise CheckpointError(
            f"{text or repr(text)} does not exist; give a directory, a .safetensors or .gguf file, "
            "or a hub id (owner/name, or owner/name:file.gguf)"
        )
    return _open_path(hub.fetch(text, revision=revision, offline=offline or env.hub_offline()))


def _open_path(path: Path) -> Checkpoint:
    return _open_directory(path) if os.path.isdir(path) else _open_file(path)


def _open_directory(path: Path) -> Checkpoint:
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be listed: {error.strerror}") from error
    if MANIFEST_NAME in names:
        return PackedCheckpoint.open(path)
    if SINGLE_NAME in names or INDEX_NAME in names:
        return SafetensorsCheckpoint.open(path)
    ggufs = first_parts(names)
    if len(ggufs) == 1:
        return GgufCheckpoint.open(path / ggufs[0])
    if ggufs:
        raise CheckpointError(
            f"{path} holds {len(ggufs)} GGUF models; open one of them: "
            + ", ".join(str(path / name) for name in ggufs[:12])
            + (" ..." if len(ggufs) > 12 else "")
        )
    _refuse_directory(path, names)


def _refuse_directory(path: Path, names: list[str]) -> NoReturn:
    if not names:
        raise CheckpointError(f"{path} is an empty directory; it holds no model")
    wanted = f"{SINGLE_NAME}, {INDEX_NAME}, a .gguf file or {MANIFEST_NAME}"
    pickled = [name for name in names if name.endswith(_PICKLED) and "model" in name]
    tensors = [name for name in names if name.endswith(".safetensors")]
    if pickled and not tensors:
        _refuse_pickle(path / pickled[0])
    if len(tensors) == 1:
        hint = f"to open {tensors[0]} on its own, give its path"
    elif tensors:
        hint = f"it has {len(tensors)} .safetensors files but no index; fetch {INDEX_NAME}"
    else:
        hint = "is it the right directory?"
    listed = ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
    raise CheckpointError(f"{path} holds none of {wanted} ({hint}); found: {listed}")


def _open_file(path: Path) -> Checkpoint:
    name = path.name
    if name.endswith((".safetensors", INDEX_SUFFIX)):
        return SafetensorsCheckpoint.open(path)
    if name.endswith(".gguf") or _first_bytes(path) == _GGUF_MAGIC:
        return GgufCheckpoint.open(path)
    if name == MANIFEST_NAME:
        return _open_directory(path.parent)
    if name.endswith(_PICKLED):
        _refuse_pickle(path)
    if name.endswith(_OTHER):
        raise UnsupportedFormat(
            f"{path}: {path.suffix} files are not read; use the model's safetensors or GGUF files"
        )
    raise CheckpointError(
        f"{path} is neither a .safetensors nor a GGUF file; give the model's directory or one of "
        "these"
    )


def _first_bytes(path: Path) -> bytes:
    source = SourceFile(path)
    try:
        return source.pread(0, min(4, source.size))
    finally:
        source.close()


def _refuse_pickle(path: Path) -> NoReturn:
    raise UnsupportedFormat(
        f"{path} is a pickle, which can run code when it is read, so it is not opened; convert a "
        "model you trust with transformers: AutoModelForCausalLM.from_pretrained("
        f"{str(path.parent)!r}).save_pretrained(OUT)"
    )

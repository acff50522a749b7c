"""Owns GGUF checkpoints: one file, or all parts of a split one, as one table of tensors.

gguf_header.py parses a file; here the parts are found and checked against each other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moestro.checkpoints.base import TensorInfo
from moestro.checkpoints.files import SourceFile, show
from moestro.checkpoints.gguf_header import Header, parse
from moestro.checkpoints.gguf_types import TYPES
from moestro.checkpoints.table import TensorTable
from moestro.core.errors import CheckpointError

# gguf-split: "<prefix>-<part, from 1>-of-<parts>.gguf", both of five digits.
_SPLIT_NAME = re.compile(r"(?P<prefix>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

_BLOCKS = {kind.name: kind.block for kind in TYPES.values()}


class GgufCheckpoint(TensorTable):
    """A GGUF v2 or v3 model. ``config`` is the metadata of the (first) file."""

    container = "gguf"

    @classmethod
    def open(cls, path: Path) -> GgufCheckpoint:
        """Open a .gguf file; the first part of a split model opens all parts.

        Raises CheckpointError for a missing part and for anything corrupt, UnsupportedFormat for
        versions, byte orders and tensor types that are not read.
        """
        files = [SourceFile(path)]
        try:
            headers = [parse(files[0])]
            for other in _other_parts(path, headers[0].metadata):
                files.append(SourceFile(other))
                headers.append(parse(files[-1]))
            infos = _merge([file.path for file in files], headers)
        except BaseException:
            for file in files:
                file.close()
            raise
        return cls(path, headers[0].metadata, infos, files)

    @property
    def architecture(self) -> str:
        """``general.architecture``. Raises CheckpointError if the file does not say."""
        value = self.config.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise CheckpointError(
                f"{self.path} does not name its model family (general.architecture is missing); "
                "convert the model again"
            )
        return value

    def _block(self, dtype: str) -> int:
        return _BLOCKS[dtype]


def split_paths(path: Path) -> list[Path] | None:
    """The names of all parts that a split file's own name declares, or None if it is not one."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return None
    prefix, count = match["prefix"], int(match["count"])
    return [path.with_name(split_name(prefix, part, count)) for part in range(1, count + 1)]


def split_name(prefix: str, part: int, count: int) -> str:
    """The file name of part ``part`` (from 1) of ``count``."""
    return f"{prefix}-{part:05d}-of-{count:05d}.gguf"


def first_parts(names: list[str]) -> list[str]:
    """The .gguf files among relative ``names`` that open a model: parts whose first part is there
    too are left out. Sorted."""
    listed = set(names)
    out = []
    for name in sorted(names):
        if name.endswith(".gguf"):
            parts = split_paths(Path(name))
            if not parts or parts[0].as_posix() == name or parts[0].as_posix() not in listed:
                out.append(name)
    return out


def _other_parts(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """The parts after the first; empty for a model that is not split."""
    count = metadata.get("split.count", 1)
    number = metadata.get("split.no", 0)
    if type(count) is not int or type(number) is not int or count < 0 or number < 0:
        raise CheckpointError(f"{path}: split.count and split.no are not counts; it is corrupt")
    if count <= 1:
        return []
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count or int(match["part"]) != number + 1:
        prefix = match["prefix"] if match else path.stem
        raise CheckpointError(
            f"{path} declares itself part {number + 1} of a model split into {count} files, but "
            f"is not named so; name its parts {split_name(prefix, 1, count)} and so on, and open "
            "the first"
        )
    paths = [path.with_name(split_name(match["prefix"], i, count)) for i in range(1, count + 1)]
    if number != 0:
        raise CheckpointError(
            f"{path} is part {number + 1} of {count}; open the first part: {paths[0]}"
        )
    missing = [part.name for part in paths if not os.path.exists(part)]
    if missing:
        listed = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
        raise CheckpointError(
            f"{path} is split into {count} files, {len(missing)} of which are missing beside it: "
            f"{listed}; fetch all parts into one directory"
        )
    return paths[1:]


def _merge(paths: list[Path], headers: list[Header]) -> dict[str, TensorInfo]:
    """One table out of all parts, checked against what each part says of the split."""
    infos: dict[str, TensorInfo] = {}
    for part, (path, header) in enumerate(zip(paths, headers, strict=True)):
        found = (header.metadata.get("split.no"), header.metadata.get("split.count"))
        if len(paths) > 1 and found != (part, len(paths)):
            raise CheckpointError(
                f"{path} should be part {part + 1} of {len(paths)}, but declares split.no "
                f"{found[0]} and split.count {found[1]}; the parts are of different models"
            )
        for name, info in header.infos.items():
            if name in infos:
                raise CheckpointError(
                    f"{path}: tensor {show(name)} is also in {infos[name].file.name}; the parts "
                    "are of different models"
                )
            infos[name] = info
    declared = headers[0].metadata.get("split.tensors.count", len(infos))
    if len(paths) > 1 and declared != len(infos):
        raise CheckpointError(
            f"{paths[0]} declares {declared} tensors over {len(paths)} files, but they hold "
            f"{len(infos)}; the parts are of different models"
        )
    return infos

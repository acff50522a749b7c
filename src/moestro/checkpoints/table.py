"""Owns the part that all containers share: a table of checked tensors over open files."""

from __future__ import annotations

import bisect
import difflib
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor

from moestro.checkpoints.base import TensorInfo
from moestro.checkpoints.files import SourceFile, show
from moestro.core.errors import CheckpointError, InvalidRequest

T = TypeVar("T", bound="TensorTable")


class TensorTable:
    """Names, infos and reads over a set of open files; a container adds how it is opened.

    ``infos`` come in disk order and their ranges have been checked; ``files`` are owned from here.
    """

    container: str

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        infos: Mapping[str, TensorInfo],
        files: Iterable[SourceFile],
    ) -> None:
        self._path = path
        self._config = MappingProxyType(dict(config))
        self._infos = dict(infos)
        self._files = {file.path: file for file in files}

    @property
    def path(self) -> Path:
        """What was opened: a directory or a file."""
        return self._path

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json, or the metadata of a GGUF file. Read-only."""
        return self._config

    def names(self) -> list[str]:
        """All tensor names, in the order they lie on disk."""
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Where a tensor is. Raises CheckpointError naming the nearest names if there is none."""
        try:
            return self._infos[name]
        except KeyError:
            raise CheckpointError(
                f"{self._path} has no tensor {show(name)}; {self._hint(name)}"
            ) from None

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The stored bytes of a tensor, or of its first-axis indices [start, stop).

        Returns a fresh uint8 tensor [nbytes]. Raises CheckpointError for an unknown name and a file
        that fails or got shorter; InvalidRequest for rows outside the first axis, or that cut
        through a quantization block (only possible in 1-D tensors).
        """
        info = self.info(name)
        start, stop = 0, info.nbytes
        if rows is not None:
            start, stop = _byte_range(info, rows, self._block(info.dtype))
        return self._files[info.file].read_tensor(info.offset + start, stop - start)

    def read_range(self, name: str, start: int, nbytes: int) -> Tensor:
        """Bytes [start, start + nbytes) of a tensor, as a fresh uint8 tensor [nbytes].

        Raises InvalidRequest if the tensor ends before, and else as ``read`` does.
        """
        info = self.info(name)
        require_range(info, start, nbytes)
        return self._files[info.file].read_tensor(info.offset + start, nbytes)

    def read_once(self) -> None:
        """From now on let what was read leave the page cache: for a pass over files that may be
        larger than memory.
        """
        for file in self._files.values():
            file.read_once()

    def close(self) -> None:
        """Close all files. Reading afterwards raises CheckpointError."""
        for file in self._files.values():
            file.close()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.container} checkpoint {self._path}: {len(self._infos)} tensors>"

    def _block(self, dtype: str) -> int:
        """Elements of a row that are stored together."""
        return 1

    def _hint(self, name: str) -> str:
        names = sorted(self._infos)
        if not names:
            return "it holds no tensors"
        # difflib is slow, and a big model has 100,000 names: look only near the alphabetical place.
        at = bisect.bisect(names, name)
        close = difflib.get_close_matches(name, names[max(0, at - 200) : at + 200], n=3)
        listed = ", ".join(show(n) for n in close or names[:3])
        return f"nearest: {listed}" if close else f"it holds {len(names)}, such as {listed}"


def require_range(info: TensorInfo, start: int, nbytes: int) -> None:
    """Raise InvalidRequest unless a tensor has the bytes [start, start + nbytes)."""
    if start < 0 or not 0 <= nbytes <= info.nbytes - start:
        raise InvalidRequest(
            f"bytes {start} to {start + nbytes} of {info.name}, which has {info.nbytes}"
        )


def _byte_range(info: TensorInfo, rows: tuple[int, int], block: int) -> tuple[int, int]:
    start, stop = rows
    count = info.shape[0] if info.shape else 0
    if not 0 <= start <= stop <= count:
        raise InvalidRequest(
            f"rows {start} to {stop} of tensor {show(info.name)} with shape {list(info.shape)}: "
            f"its first axis has {count}"
        )
    if count == 0:
        return 0, 0
    # Rows hold whole blocks; only a vector, whose first axis is its row, can be cut within one.
    inside = len(info.shape) == 1 and (start % block or stop % block)
    if inside or start * info.nbytes % count or stop * info.nbytes % count:
        raise InvalidRequest(
            f"rows {start} to {stop} of tensor {show(info.name)} with shape {list(info.shape)} "
            f"cut through a block of {info.dtype}; read the whole tensor"
        )
    return start * info.nbytes // count, stop * info.nbytes // count


def check_disjoint(infos: Iterable[TensorInfo], path: Path) -> None:
    """Raise CheckpointError if two tensors of one file share bytes."""
    used = sorted((i for i in infos if i.nbytes), key=lambda i: i.offset)
    for a, b in itertools.pairwise(used):
        if a.offset + a.nbytes > b.offset:
            raise CheckpointError(
                f"{path}: tensors {show(a.name)} (bytes {a.offset} to {a.offset + a.nbytes}) and "
                f"{show(b.name)} (from byte {b.offset}) overlap; the file is corrupt"
            )

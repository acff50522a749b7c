"""What a checkpoint is: names, shapes, byte ranges and facts, read from headers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor on disk. ``shape`` is row-major as torch would show it ([N, K] for a matrix,
    [E, N, K] for stacked experts), for GGUF too. ``dtype`` is ``F32``, ``F16``, ``BF16`` or a GGUF
    type name such as ``Q4_K``. The byte range has been checked against the file's size.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    nbytes: int

    @property
    def stored_nbytes(self) -> int:
        """Bytes of all that has to be read for this weight."""
        return self.nbytes


class Checkpoint(Protocol):
    """An opened checkpoint. Opening reads headers only."""

    @property
    def path(self) -> Path: ...
    @property
    def container(self) -> str:
        """``safetensors``, ``gguf`` or ``packed``."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json of a Hugging Face checkpoint; the metadata key/values of a GGUF file."""
        ...

    @property
    def architecture(self) -> str:
        """Hugging Face model_type; for GGUF, ``general.architecture`` as it stands."""
        ...

    def names(self) -> list[str]: ...
    def info(self, name: str) -> TensorInfo:
        """Raises CheckpointError naming the nearest names when there is no such tensor."""
        ...

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The raw bytes (uint8, 1-D) of a tensor, or of first-axis indices [start, stop)."""
        ...

    def read_range(self, name: str, start: int, nbytes: int) -> Tensor:
        """Bytes [start, start + nbytes) of a tensor (uint8, 1-D)."""
        ...

    def read_once(self) -> None:
        """From now on let what was read leave the page cache: for a pass over files that may be
        larger than memory.
        """
        ...

    def close(self) -> None: ...

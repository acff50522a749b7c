"""A cap on a process's memory, page cache included, by a control group (version 1 or 2); and how
files leave the page cache.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_ROOT = Path("/sys/fs/cgroup")


class NoMemoryGroup(Exception):
    """This system lets us make no control group with a memory limit."""


class MemoryGroup:
    """A control group of ``nbytes`` for the commands that ``wrap`` starts; a context manager."""

    def __init__(self, name: str, nbytes: int) -> None:
        version1 = (_ROOT / "memory").is_dir()
        self._folder = (_ROOT / "memory" if version1 else _ROOT) / f"moestro-{name}"
        limit = "memory.limit_in_bytes" if version1 else "memory.max"
        self._peak = self._folder / ("memory.max_usage_in_bytes" if version1 else "memory.peak")
        try:
            self._folder.mkdir(exist_ok=True)
            (self._folder / limit).write_text(str(nbytes))
        except OSError as error:
            raise NoMemoryGroup(
                f"{self._folder} with {limit} cannot be made ({error.strerror}); run as root where "
                "control groups are writable"
            ) from error

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command, started inside the group."""
        enter = f'echo $$ > {self._folder}/cgroup.procs && exec "$@"'
        return ["sh", "-c", enter, "sh", *command]

    @property
    def peak(self) -> int:
        """Most bytes it held at once, page cache included."""
        return int(self._peak.read_text())

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._folder.rmdir()


def forget(path: Path) -> None:
    """Drop a file, or the files of a folder, from the page cache."""
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if not file.is_file():
            continue
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)

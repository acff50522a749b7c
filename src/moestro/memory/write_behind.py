"""A file written from its start to its end, on disk soon and out of the page cache as soon.

Left to itself the system keeps gigabytes of written pages, makes the writer wait when they are too
many, and throws out what others had cached to keep them.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

#: bytes written between two turns of the disk
STEP_NBYTES = 64 << 20


class WriteBehind:
    """A context manager; leaving it closes the file, whatever is on disk by then.

    Errors of the disk (OSError) come out of ``write`` or ``finish``, maybe of a later one.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  closed by __exit__
        self._pool = ThreadPoolExecutor(1, "moestro-flush")
        self._flushing: Future[None] | None = None
        self._flushed = 0
        self.nbytes = 0

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()  # a flush that runs needs the file open
        self._file.close()

    def write(self, view: memoryview) -> None:
        """All bytes of a view of bytes."""
        while view.nbytes:
            step = self._file.write(view[:STEP_NBYTES]) or 0
            self.nbytes += step
            view = view[step:]
            if self.nbytes - self._flushed >= STEP_NBYTES:
                self._wait()  # so that no more than two steps are under way
                start, self._flushed = self._flushed, self.nbytes
                self._flushing = self._pool.submit(self._flush, start, self._flushed)

    def finish(self) -> None:
        """All is on disk when this returns, and nothing in the page cache (which is advice, ignored
        by some systems).
        """
        self._wait()
        os.fsync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _wait(self) -> None:
        if self._flushing is not None:
            self._flushing.result()
            self._flushing = None

    def _flush(self, start: int, stop: int) -> None:
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), start, stop - start, os.POSIX_FADV_DONTNEED)

"""How fast files are read at random places, a few megabytes at a time, past the page cache."""

from __future__ import annotations

import mmap
import os
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from moestro.core.errors import InvalidRequest

_PAGE = 4096
_FILE_NBYTES = 1 << 29
_BLOCK = 4 << 20  # about an expert
_DEPTHS = (1, 4, 8, 16)
_SECONDS = 0.4  # for each depth
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """read: bytes per second of random reads with ``queue_depth`` of them in flight, the best of
    those tried. direct: the file system lets reads go past the page cache; else ``read`` may be of
    memory.
    """

    read: float
    queue_depth: int
    direct: bool


def measure_disk(path: Path) -> DiskFacts:
    """Of the file ``path``, or with a temporary file in the directory ``path``. Takes some seconds.

    Raises InvalidRequest where neither can be done.
    """
    try:
        if path.is_file() and path.stat().st_size >= 4 * _BLOCK:
            return _measure(path)
        with tempfile.NamedTemporaryFile(dir=path if path.is_dir() else path.parent) as file:
            piece = random.randbytes(_BLOCK)
            for _ in range(_FILE_NBYTES // _BLOCK):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            return _measure(Path(file.name))
    except OSError as error:
        raise InvalidRequest(f"the disk of {path} cannot be measured: {error.strerror}") from error


def _measure(path: Path) -> DiskFacts:
    handle, direct = _open(path)
    try:
        blocks = os.fstat(handle).st_size // _BLOCK
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        best = DiskFacts(read=0.0, queue_depth=1, direct=direct)
        for depth in _DEPTHS:
            read = sorted(_rate(handle, blocks, depth) for _ in range(_ROUNDS))[_ROUNDS // 2]
            if read > 1.05 * best.read:
                best = DiskFacts(read=read, queue_depth=depth, direct=direct)
        return best
    finally:
        os.close(handle)


def _open(path: Path) -> tuple[int, bool]:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT), True
    except OSError:  # tmpfs and some overlays
        return os.open(path, os.O_RDONLY), False


def _rate(handle: int, blocks: int, depth: int) -> float:
    """Bytes per second of reads by ``depth`` threads for a while."""
    end = time.perf_counter() + _SECONDS / _ROUNDS
    seeds = [random.randrange(1 << 30) for _ in range(depth)]

    def read(seed: int) -> int:
        chosen, done = random.Random(seed), 0
        with mmap.mmap(-1, _BLOCK + _PAGE) as buffer:  # direct reads need aligned memory
            view = memoryview(buffer)[:_BLOCK]
            while time.perf_counter() < end:
                done += os.preadv(handle, [view], chosen.randrange(blocks) * _BLOCK)
            view.release()
        return done

    start = time.perf_counter()
    with ThreadPoolExecutor(depth) as pool:
        done = sum(pool.map(read, seeds))
    return done / (time.perf_counter() - start)

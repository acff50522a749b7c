"""How fast files are read at random places, a few megabytes at a time, past the page cache."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from moestro.core.errors import InvalidRequest
from moestro.machine.facts import disk_free

_BLOCK = 4096  # places, lengths and memory of unbuffered reads are multiples of it
_SIZES = tuple(n << 20 for n in (1, 2, 4, 8, 16))
_DEPTHS = (1, 2, 4, 8, 16, 32)
_IN_FLIGHT = 128 << 20  # at most; more says nothing about a drive, and takes memory
_SECONDS = 0.24  # for each size and depth
_ROUNDS = 3
_NEAR = 0.97  # of the best rate is as good: fewer reads in flight end sooner
# What is measured should be more than drives and hosts keep in memory of their own.
_FILE_NBYTES = 1 << 30
_LEAST_NBYTES = 64 << 20
_PIECE = 4 << 20
_WRITE_SECONDS = 15  # where writing is slow, a smaller file has to do


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """Random reads of a disk. Rates in bytes per second, each a median.

    read: the rate at the best size; queue_depth: the least number of reads in flight for nearly
    that. direct: the file system lets reads go past the page cache; else ``read`` may be of memory.
    rates: (bytes of a read, reads in flight, rate) of all that was tried. least, greatest: of the
    rates whose median is ``read``.
    """

    read: float
    queue_depth: int
    direct: bool
    rates: tuple[tuple[int, int, float], ...] = ()
    least: float = 0.0
    greatest: float = 0.0

    def __post_init__(self) -> None:
        # Lists, where it comes from JSON.
        rates = tuple((int(nbytes), int(depth), float(rate)) for nbytes, depth, rate in self.rates)
        object.__setattr__(self, "rates", rates)

    def of(self, nbytes: int) -> tuple[float, int]:
        """(rate, queue depth) for reads of this size: of the nearest that was tried."""
        if not self.rates:
            return self.read, self.queue_depth
        size = min((n for n, _, _ in self.rates), key=lambda n: max(n, nbytes) / min(n, nbytes))
        found = {depth: rate for n, depth, rate in self.rates if n == size}
        depth = _depth(found)
        return found[depth], depth


def measure_disk(path: Path) -> DiskFacts:
    """Of the file ``path``, or of the large files in the directory ``path`` (a model's), or else of
    a temporary file there. Takes some ten seconds, 128 MiB of memory, and 1 GiB of disk for the
    temporary file.

    Raises InvalidRequest where none of it can be done.
    """
    try:
        with large_files(path) as files, Reader(files) as reader:
            return _measure(reader)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidRequest(f"the disk of {path} cannot be measured: {reason}") from error


@contextlib.contextmanager
def large_files(path: Path) -> Iterator[list[Path]]:
    """Files to read, with at least _FILE_NBYTES together; those of the user, or one made here."""
    found = [path] if path.is_file() else []
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.is_file())
    found = [p for p in found if p.stat().st_size >= _LEAST_NBYTES and os.access(p, os.R_OK)]
    if sum(p.stat().st_size for p in found) >= _FILE_NBYTES:
        yield found
        return
    folder = path if path.is_dir() else path.parent
    nbytes = min(_FILE_NBYTES, disk_free(folder) // 4) // _PIECE * _PIECE
    if nbytes < min(_FILE_NBYTES, _LEAST_NBYTES):
        raise InvalidRequest(
            f"the disk of {path} cannot be measured: a file of {_LEAST_NBYTES >> 20} MiB for it "
            "leaves too little room; free some, or name a large file there"
        )
    with tempfile.TemporaryFile(dir=folder) as file:  # without a name: nothing stays, come what may
        pieces = [random.randbytes(_PIECE) for _ in range(8)]
        start = time.perf_counter()
        for i in range(nbytes // _PIECE):
            file.write(pieces[i % len(pieces)])
            if (i + 1) % len(pieces) == 0:
                os.fdatasync(file.fileno())
                if time.perf_counter() - start > _WRITE_SECONDS and file.tell() >= _LEAST_NBYTES:
                    break
        file.flush()
        os.fdatasync(file.fileno())
        yield [Path(f"/proc/self/fd/{file.fileno()}")]


class Reader:
    """Reads of random places by threads, each into its parts of one memory."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.direct = True
        self._memory = _touched(_IN_FLIGHT)
        self._handles: list[int] = []
        self._blocks: list[int] = []
        self._pool = ThreadPoolExecutor(max(_DEPTHS))
        for file in files:
            self._open(file)

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown()
        for handle in self._handles:
            os.close(handle)

    def rate(self, nbytes: int, depth: int, seconds: float) -> float:
        """Bytes per second with ``depth`` reads of ``nbytes`` in flight for a while."""
        if not self.direct:
            for handle in self._handles:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        all_parts = [
            self._memory[at : at + nbytes] for at in range(0, _IN_FLIGHT - nbytes + 1, nbytes)
        ]
        parts = [all_parts[i::depth] for i in range(depth)]
        done = sum(self._pool.map(lambda own: self._read(own, start + seconds), parts))
        return done / (time.perf_counter() - start)

    def fits(self, nbytes: int) -> bool:
        return any(blocks * _BLOCK >= nbytes for blocks in self._blocks)

    def _read(self, parts: Sequence[memoryview], end: float) -> int:
        chosen, done = random.Random(), 0
        nbytes = len(parts[0])
        files = [i for i, blocks in enumerate(self._blocks) if blocks * _BLOCK >= nbytes]
        weights = [self._blocks[i] for i in files]
        # Never the same part soon again, as it would still be in the CPU's caches.
        for to in itertools.cycle(parts):
            file = chosen.choices(files, weights)[0]
            place = chosen.randrange(self._blocks[file] - nbytes // _BLOCK + 1) * _BLOCK
            got = os.preadv(self._handles[file], [to], place)
            if got <= 0:
                raise OSError(f"a read at {place} gave nothing")
            done += got
            if time.perf_counter() >= end:
                break
        return done

    def _open(self, file: Path) -> None:
        try:
            handle = os.open(file, os.O_RDONLY | os.O_DIRECT)
            self._handles.append(handle)
            os.preadv(handle, [self._memory[:_BLOCK]], 0)
        except OSError:  # some file systems refuse to open so, some to read
            self.direct = False
            self._handles = self._handles[: len(self._blocks)]
            self._handles.append(os.open(file, os.O_RDONLY))
        self._blocks.append(os.fstat(self._handles[-1]).st_size // _BLOCK)


def _touched(nbytes: int) -> memoryview:
    """Memory as experts get it: on huge pages where there are any, and all of it there already."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    for start in range(0, nbytes, _PIECE):
        view[start : start + _PIECE] = bytes(len(view[start : start + _PIECE]))
    return view


def _measure(reader: Reader) -> DiskFacts:
    cells = [
        (nbytes, depth)
        for nbytes in _SIZES
        for depth in _DEPTHS
        if nbytes * depth <= _IN_FLIGHT and reader.fits(nbytes)
    ]
    samples: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    for _ in range(_ROUNDS):  # all cells in each round, so that a slow moment spoils one of each
        for cell in cells:
            samples[cell].append(reader.rate(*cell, _SECONDS / _ROUNDS))
    rates = {cell: statistics.median(found) for cell, found in samples.items()}
    size, _ = max(rates, key=lambda cell: rates[cell])
    depth = _depth({depth: rate for (n, depth), rate in rates.items() if n == size})
    # The best of many was lucky: what it is worth is seen by trying it again.
    again = [reader.rate(size, depth, _SECONDS) for _ in range(2 * _ROUNDS - 1)]
    return DiskFacts(
        read=statistics.median(again),
        queue_depth=depth,
        direct=reader.direct,
        rates=tuple((nbytes, depth, rate) for (nbytes, depth), rate in rates.items()),
        least=min(again),
        greatest=max(again),
    )


def _depth(rates: dict[int, float]) -> int:
    """The least depth whose rate is nearly the best."""
    best = max(rates.values())
    return min(depth for depth, rate in rates.items() if rate >= _NEAR * best)

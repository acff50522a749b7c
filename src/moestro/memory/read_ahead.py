"""Reads that run ahead of their use, so that the disk works while weights are packed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

#: bytes read and not yet used; one larger read is still made alone
AHEAD_NBYTES = 64 << 20
#: enough for most disks
MIN_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class Read(Generic[T]):
    """nbytes: about what the result holds."""

    nbytes: int
    run: Callable[[], T]


def read_ahead(
    reads: Iterable[Read[T]], *, ahead_nbytes: int = AHEAD_NBYTES, threads: int = MIN_THREADS
) -> Generator[T, None, None]:
    """The results in order, read on a few threads. A read's error is raised where its result would
    have come. Whoever stops early closes the iterator, which waits for the reads that run.
    """
    waiting: deque[tuple[Future[T], int]] = deque()
    held = 0
    pool = ThreadPoolExecutor(threads, "moestro-read")
    try:
        for read in reads:
            while waiting and held + read.nbytes > ahead_nbytes:
                future, nbytes = waiting.popleft()
                held -= nbytes
                yield future.result()
                del future
            waiting.append((pool.submit(read.run), read.nbytes))
            held += read.nbytes
        while waiting:
            yield waiting.popleft()[0].result()
    finally:
        pool.shutdown(cancel_futures=True)

"""Reads ahead of their use: order, how far ahead, errors, and that nothing is left running."""

from __future__ import annotations

import threading
from contextlib import closing
from functools import partial

import pytest

from moestro.memory.read_ahead import Read, read_ahead


class Disk:
    """Counts what has been read."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.lock = threading.Lock()

    def read(self, index: int) -> int:
        with self.lock:
            self.started.append(index)
        if index == 13:
            raise OSError("block 13 is bad")
        return index * index


def test_results_come_in_order_and_reads_stay_close() -> None:
    disk = Disk()
    sizes = [1, 5, 2, 100, 1, 1, 3, 7, 2, 1, 1, 1]
    reads = [Read(nbytes=n, run=partial(disk.read, i)) for i, n in enumerate(sizes)]
    used = 0
    for used, found in enumerate(read_ahead(reads, ahead_nbytes=10)):
        assert found == used * used
        with disk.lock:
            ahead = [sizes[i] for i in disk.started if i > used]
        assert sum(ahead) <= 10 or len(ahead) == 1
    assert used == len(sizes) - 1 and sorted(disk.started) == list(range(len(sizes)))


def test_an_error_comes_where_its_result_would_have() -> None:
    disk = Disk()
    reads = [Read(nbytes=1, run=partial(disk.read, i)) for i in range(11, 100)]
    found = []
    with pytest.raises(OSError, match="block 13"):
        found.extend(read_ahead(reads, ahead_nbytes=4))
    assert len(disk.started) < 10


def test_who_stops_early_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    disk = Disk()
    reads = (Read(nbytes=1, run=partial(disk.read, i)) for i in range(20, 1000))
    with closing(read_ahead(reads, ahead_nbytes=4)) as found:
        assert next(found) == 400
    assert threading.active_count() == before
    assert len(disk.started) < 10


def test_no_reads_are_no_results() -> None:
    assert list(read_ahead([])) == []

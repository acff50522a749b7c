"""The block reader beside the drive's own limit: random reads of experts, past the page cache.

The limit is a plain loop of preadv by threads, each into its own memory, at the queue depth that
serves reads of this size best. The two take turns, and each of the reader's rates is compared with
the limits just before and after it.

    python benchmarks/bench_disk.py --path MODEL_DIRECTORY
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moestro import native
from moestro.machine import disk

_BLOCK = 4096
_MEMORY = 128 << 20


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians; rates in GB/s. fraction: of the limit. cpu: of one core, while reading."""

    engine: str
    queue_depth: int
    piece_nbytes: int
    gb_s: float
    gb_s_min: float
    gb_s_max: float
    fraction: float
    cpu: float


class BlockReads:
    """Random reads through the block reader, ``depth`` in flight, awaited in turn."""

    def __init__(
        self, files: list[Path], nbytes: int, engine: str, depth: int, piece_nbytes: int
    ) -> None:
        self._reader = native.BlockReader(
            [[str(file)] for file in files],
            queue_depth=depth,
            engine=engine,
            piece_nbytes=piece_nbytes,
        )
        self._sizes = [self._reader.size(i) for i in range(len(files))]
        # As slots of experts: one memory, larger than the CPU's caches, and all of it there.
        memory = native.allocate_bytes(_MEMORY)
        memory[:] = 1
        count = _MEMORY // nbytes
        self._buffers = [memory[i * nbytes : (i + 1) * nbytes] for i in range(count)]
        self._depth = depth
        self._chosen = random.Random()
        self.engine = self._reader.stats()["engine"]

    def _begin(self, buffer: np.ndarray) -> Any:
        file = self._chosen.choices(range(len(self._sizes)), self._sizes)[0]
        places = (self._sizes[file] - buffer.size) // _BLOCK + 1
        return self._reader.submit(file, self._chosen.randrange(places) * _BLOCK, buffer)

    def rate(self, seconds: float) -> tuple[float, float]:
        """(bytes per second, CPU seconds per second)."""
        start, cpu, done = time.perf_counter(), time.process_time(), 0
        reads: deque[Any] = deque()
        for buffer in itertools.cycle(self._buffers):
            ends = time.perf_counter() - start >= seconds
            while reads and (ends or len(reads) == self._depth):
                reads.popleft().wait()
                done += buffer.size
            if ends:
                break
            reads.append(self._begin(buffer))
        elapsed = time.perf_counter() - start
        return done / elapsed, (time.process_time() - cpu) / elapsed


def best_depth(reader: disk.Reader, nbytes: int, depths: list[int], seconds: float) -> int:
    samples: dict[int, list[float]] = {depth: [] for depth in depths}
    for _ in range(3):
        for depth, found in samples.items():
            found.append(reader.rate(nbytes, depth, seconds))
    return max(depths, key=lambda depth: statistics.median(samples[depth]))


def compared(
    reads: BlockReads, reader: disk.Reader, options: argparse.Namespace, limit_depth: int
) -> tuple[Row, list[float]]:
    def limit() -> float:
        return reader.rate(options.nbytes, limit_depth, options.seconds)

    rates, fractions, cpus, limits = [], [], [], [limit()]
    for _ in range(options.rounds):
        rate, cpu = reads.rate(options.seconds)
        limits.append(limit())
        rates.append(rate)
        cpus.append(cpu)
        fractions.append(rate / ((limits[-2] + limits[-1]) / 2))
    row = Row(
        engine=reads.engine,
        queue_depth=options.depth,
        piece_nbytes=options.piece_nbytes,
        gb_s=statistics.median(rates) / 1e9,
        gb_s_min=min(rates) / 1e9,
        gb_s_max=max(rates) / 1e9,
        fraction=statistics.median(fractions),
        cpu=statistics.median(cpus),
    )
    return row, limits


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, default=Path("."), help="a large file, or a directory")
    parser.add_argument("--nbytes", type=int, default=2400256, help="of a read")
    parser.add_argument("--depth", type=int, default=8, help="of the block reader")
    parser.add_argument("--piece-nbytes", type=int, default=4 << 20)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    options.nbytes = options.nbytes // _BLOCK * _BLOCK
    return options


def main() -> int:
    options = parse()
    rows, limits = [], []
    with disk.large_files(options.path) as files, disk.Reader(files) as reader:
        depth = best_depth(reader, options.nbytes, [1, 2, 4, 8, 16, 32], options.seconds / 5)
        for engine in ("io_uring", "pread"):
            if engine == "io_uring" and native.uring_refusal():
                continue
            reads = BlockReads(files, options.nbytes, engine, options.depth, options.piece_nbytes)
            row, found = compared(reads, reader, options, depth)
            rows.append(row)
            limits += found
        direct = reader.direct
    limit = statistics.median(limits) / 1e9
    head = {
        "nbytes": options.nbytes,
        "direct": direct,
        "limit_gb_s": limit,
        "limit_gb_s_min": min(limits) / 1e9,
        "limit_gb_s_max": max(limits) / 1e9,
        "limit_depth": depth,
    }
    if options.json:
        print(json.dumps(head | {"rows": [asdict(row) for row in rows]}, indent=2))
        return 0
    print(
        f"random reads of {options.nbytes} bytes{'' if direct else ', through the page cache'}; "
        f"limit {limit:.2f} GB/s with {depth} in flight "
        f"({head['limit_gb_s_min']:.2f} to {head['limit_gb_s_max']:.2f})"
    )
    for row in rows:
        print(
            f"{row.engine:9s} {row.queue_depth:3d} in flight  {row.gb_s:6.2f} GB/s "
            f"({row.gb_s_min:.2f} to {row.gb_s_max:.2f})  {row.fraction:6.1%} of the limit  "
            f"{row.cpu:5.1%} of a core"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Packing and loading alone: exact repacking and packed reads against memory copies and file reads.

    python benchmarks/bench_load.py --threads 2

Each measurement stands between two of what bounds it: for packing a copy of the same bytes into
fresh memory by as many threads, for loading reads of the same file into fresh memory (from the page
cache, unless the file is larger than it). Medians over the rounds are reported. Quantizing is bound
by arithmetic, so it is reported in weights per second alone.

    python benchmarks/bench_load.py --model-gib 8

loads a whole model instead (see ``big_model.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

import big_model
from moestro import formats, native
from moestro.checkpoints import open_checkpoint
from moestro.checkpoints.packed import PackedCheckpoint
from moestro.formats.base import packed_buffer
from moestro.memory.convert import convert
from moestro.memory.loader import load_weights
from moestro.memory.policy import FormatPolicy
from moestro.memory.weights import ExpertSources, WeightSpec

COLS = 2048
#: source type -> (channels, bytes) of a block
SOURCES = {
    "BF16": (1, 2),
    "F16": (1, 2),
    "F32": (1, 4),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
}
QUANTIZED = ["int4-g32", "int4-g128", "int4z-g128", "int4m-g32", "int8-g32", "k4", "k6"]
_PIECE = 1 << 22
_READ = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Row:
    """seconds: median of one run. limit: what gb_s is a fraction of, also in GB/s."""

    kind: str
    name: str
    seconds: float
    gb_s: float = 0.0
    limit_gb_s: float = 0.0
    fraction: float = 0.0
    mweights_s: float = 0.0


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Limits:
    """The copies and reads that measurements are compared with."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads)

    def copy(self, source: torch.Tensor) -> float:
        """Seconds to copy into fresh memory."""
        return seconds_of(lambda: self._copy(source))

    def _copy(self, source: torch.Tensor) -> None:
        out = packed_buffer(source.numel())
        pairs = zip(source.split(_PIECE), out.split(_PIECE), strict=True)
        list(self._pool.map(lambda pair: pair[1].copy_(pair[0]), pairs))

    def read(self, path: Path) -> float:
        """Seconds to read a file into fresh memory."""
        return seconds_of(lambda: self._read(path))

    def _read(self, path: Path) -> None:
        nbytes = path.stat().st_size
        out = packed_buffer(nbytes).numpy()
        handle = os.open(path, os.O_RDONLY)
        try:
            pieces = ((handle, [out[at : at + _READ]], at) for at in range(0, nbytes, _READ))
            list(self._pool.map(lambda piece: os.preadv(*piece), pieces))
        finally:
            os.close(handle)


def compared(
    work: Callable[[], object], limit: Callable[[], float], rounds: int
) -> tuple[float, float, float]:
    """Medians of (seconds, seconds of the limit, limit / seconds), each between two limits."""
    work()
    samples = []
    before = limit()
    for _ in range(rounds):
        seconds = seconds_of(work)
        after = limit()
        bound = (before + after) / 2
        samples.append((seconds, bound, bound / seconds))
        before = after
    seconds, bound, ratio = (statistics.median(column) for column in zip(*samples, strict=True))
    return seconds, bound, ratio


def repacking(name: str, mib: int, limits: Limits, rounds: int) -> Row:
    channels, nbytes = SOURCES[name]
    row_nbytes = COLS // channels * nbytes
    rows = (mib << 20) // row_nbytes // 16 * 16
    raw = torch.full((rows * row_nbytes,), 0x11, dtype=torch.uint8)  # finite in every type
    format_ = formats.exact_for(name)
    seconds, bound, ratio = compared(
        lambda: format_.pack_exact(name, raw, rows, COLS), lambda: limits.copy(raw), rounds
    )
    return Row(
        kind="repack",
        name=f"{name} -> {format_.name}",
        seconds=seconds,
        gb_s=raw.numel() / seconds / 1e9,
        limit_gb_s=raw.numel() / bound / 1e9,
        fraction=ratio,
    )


def quantizing(name: str, rows: int, rounds: int) -> Row:
    weight = (torch.randn(rows, COLS) * 0.03).to(torch.bfloat16)
    format_ = formats.get(name)
    format_.pack(weight)
    seconds = statistics.median(seconds_of(lambda: format_.pack(weight)) for _ in range(rounds))
    return Row(
        kind="quantize",
        name=f"BF16 -> {name}",
        seconds=seconds,
        mweights_s=weight.numel() / seconds / 1e6,
    )


def write_packed(folder: Path, mib: int) -> tuple[PackedCheckpoint, WeightSpec]:
    """A packed model of one layer of 8-bit experts."""
    hidden = intermediate = 1024
    count = max(1, (mib << 20) // (3 * hidden * intermediate))
    names = ("gate", "up", "down")
    one = torch.randn(hidden, intermediate).to(torch.float16)
    tensors = {n: one.expand(count, hidden, intermediate).contiguous() for n in names}
    source = folder / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "benchmark"}')
    spec = WeightSpec(
        key="layers.0.experts",
        kind="experts",
        role="experts",
        shape=(count, intermediate, hidden),
        expert_sources=ExpertSources(**{n: (n,) for n in names}),
        layer=0,
    )
    with open_checkpoint(source) as checkpoint:
        convert(checkpoint, [spec], folder / "out", policy=FormatPolicy.parse("int8-g32"))
    packed = open_checkpoint(folder / "out")
    if not isinstance(packed, PackedCheckpoint):
        raise TypeError("convert did not write a packed model")
    return packed, spec


def loading(folder: Path, mib: int, limits: Limits, rounds: int) -> Row:
    packed, spec = write_packed(folder, mib)
    info = packed.info(spec.key)
    policy = FormatPolicy.parse("")
    seconds, bound, ratio = compared(
        lambda: load_weights(packed, [spec], policy=policy), lambda: limits.read(info.file), rounds
    )
    packed.close()
    return Row(
        kind="load",
        name="packed directory",
        seconds=seconds,
        gb_s=info.nbytes / seconds / 1e9,
        limit_gb_s=info.nbytes / bound / 1e9,
        fraction=ratio,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="source bytes repacked, and loaded")
    parser.add_argument("--rows", type=int, default=4096, help=f"of {COLS} weights quantized")
    parser.add_argument("--threads", type=int, default=0, help="0: all the process may use")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--isa", default=None, help="a kernel table other than the best")
    parser.add_argument(
        "--directory", type=Path, default=None, help="where to put the packed model"
    )
    parser.add_argument(
        "--model-gib",
        type=float,
        default=0.0,
        help="instead: load a random model of this size from disk, with its peak memory",
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    return parser.parse_args()


def load_model(options: argparse.Namespace, threads: int) -> int:
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        loads = big_model.run(Path(folder), options.model_gib, threads)
    if options.json:
        head = {"isa": native.isa(), "threads": threads}
        print(json.dumps(head | {"loads": [asdict(load) for load in loads]}, indent=2))
        return 0
    for load in loads:
        print(
            f"{load.container:10s} {'cached' if load.cached else 'disk':6s} "
            f"{load.nbytes / 2**30:6.2f} GiB in {load.seconds:6.2f} s, {load.gb_s:5.2f} GB/s, "
            f"{load.fraction:6.1%} of reads ({load.read_gb_s:.2f} GB/s); resident "
            f"{load.final_rss / 2**30:.2f} GiB, at most {load.above_final / 2**20:.0f} MiB more"
        )
    return 0


def main() -> int:
    options = parse()
    threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(1)  # copies are split by the benchmark's own threads
    if options.isa:
        native.set_isa(options.isa)
    if options.model_gib:
        return load_model(options, threads)
    limits = Limits(threads)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        load = loading(Path(folder), options.mib, limits, options.rounds)
    native.set_threads(threads)
    rows = [repacking(name, options.mib, limits, options.rounds) for name in SOURCES]
    rows += [quantizing(name, options.rows, options.rounds) for name in QUANTIZED]
    rows.append(load)
    head = {"isa": native.isa(), "threads": threads, "mib": options.mib}
    if options.json:
        print(json.dumps(head | {"rows": [asdict(row) for row in rows]}, indent=2))
        return 0
    print(f"{head['isa']}, {threads} threads, {options.mib} MiB")
    for row in rows:
        if row.kind == "quantize":
            print(f"{row.kind:9s} {row.name:22s} {row.mweights_s:7.0f} M weights/s")
        else:
            limit = "read" if row.kind == "load" else "copy"
            print(
                f"{row.kind:9s} {row.name:22s} {row.gb_s:7.2f} GB/s  "
                f"{row.fraction:6.1%} of a {limit} ({row.limit_gb_s:.2f} GB/s)"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

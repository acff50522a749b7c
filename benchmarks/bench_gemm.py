"""The dense packed linear alone, each format, against the machine's limits measured beside it.

    python benchmarks/bench_gemm.py --rows 4096 --cols 4096 --formats int4-g32,k4,bf16

Several copies of the matrix are kept and taken in turns, so that weights come from DRAM. Every
measurement stands between two probes of read bandwidth and two of the peak of the instruction that
the format's kernel is made of; medians over the rounds are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from limits import Probes, replay_seconds
from moestro import __version__, formats, native
from moestro.formats.base import Format
from moestro.memory.arena import aligned_buffer

#: weights in memory, well beyond any last-level cache slice
_WEIGHT_NBYTES = 256 << 20
_SLICE = 0.1


@dataclass(frozen=True, kw_only=True)
class Row:
    """peak: which limit the operations are compared with (``dot`` or ``bf16``)."""

    format: str
    tokens: int
    us: float
    weight_gb_s: float
    gops: float
    frac_of_read_bw: float
    peak: str
    frac_of_peak: float


class Linear:
    """Copies of one random matrix, and a program that multiplies with each of them in turn."""

    def __init__(self, fmt: Format, rows: int, cols: int) -> None:
        self.fmt, self.rows, self.cols = fmt, rows, cols
        self.nbytes = fmt.nbytes(rows, cols)
        generator = torch.Generator().manual_seed(0)
        packed = fmt.pack(torch.randn(rows, cols, generator=generator) * 0.02)
        self.copies: list[Tensor] = []
        for _ in range(max(2, -(-_WEIGHT_NBYTES // self.nbytes))):
            copy = aligned_buffer(self.nbytes)
            copy.copy_(packed)
            self.copies.append(copy)

    def record(self, tokens: int) -> native.Program:
        x, out = torch.randn(tokens, self.cols), torch.empty(tokens, self.rows)
        rows = torch.tensor([tokens], dtype=torch.int32)
        program = native.Program()
        for data in self.copies:
            native.core.linear(program, x, self.fmt.name, data, self.rows, self.cols, out, rows)
        return program


def measure(linear: Linear, tokens: int, probes: Probes, rounds: int) -> Row:
    program, count = linear.record(tokens), len(linear.copies)
    peak = probes.peak_of(linear.fmt)
    program.replay()
    repeats = max(1, int(_SLICE / replay_seconds(program, 1)))
    operations = 2 * tokens * linear.rows * linear.cols
    samples: list[tuple[float, float, float]] = []
    read, top = probes.read(), probes.take(peak)
    for _ in range(rounds):
        seconds = replay_seconds(program, repeats) / count
        read_after, top_after = probes.read(), probes.take(peak)
        samples.append(
            (seconds, linear.nbytes / seconds / ((read + read_after) / 2),
             operations / seconds / ((top + top_after) / 2))
        )  # fmt: skip
        read, top = read_after, top_after
    seconds, of_read, of_peak = (statistics.median(column) for column in zip(*samples, strict=True))
    return Row(
        format=linear.fmt.name,
        tokens=tokens,
        us=seconds * 1e6,
        weight_gb_s=linear.nbytes / seconds / 1e9,
        gops=operations / seconds / 1e9,
        frac_of_read_bw=of_read,
        peak=peak,
        frac_of_peak=of_peak,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096, help="output channels")
    parser.add_argument("--cols", type=int, default=4096, help="input channels")
    parser.add_argument("--formats", default="", help="comma-separated; default: all")
    parser.add_argument("--tokens", default="1,4,16,64,512", help="comma-separated batch sizes")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    return parser.parse_args()


def main() -> int:
    options = parse()
    native.set_threads(options.threads)
    torch.set_num_threads(1)  # its idle threads spin on the cores that are measured
    names = [name for name in options.formats.split(",") if name] or formats.names()
    tokens = [int(n) for n in options.tokens.split(",")]
    probes = Probes()
    for limit in ("read", "dot", "fma", "bf16"):
        probes.take(limit)
    rows: list[Row] = []
    for name in names:
        linear = Linear(formats.get(name), options.rows, options.cols)
        for n in tokens:
            row = measure(linear, n, probes, options.rounds)
            rows.append(row)
            if not options.json:
                print(
                    f"{row.format:12s} {row.tokens:4d} tokens {row.us:9.0f} us "
                    f"{row.weight_gb_s:6.1f} GB/s {row.gops:6.0f} GOP/s  "
                    f"{row.frac_of_read_bw:6.1%} of read  {row.frac_of_peak:6.1%} of {row.peak}",
                    flush=True,
                )
    limits = probes.summary()
    if options.json:
        report = {
            "moestro": __version__,
            "rows": options.rows,
            "cols": options.cols,
            "limits": limits.as_dict(),
            "measured": [asdict(row) for row in rows],
        }
        print(json.dumps(report, indent=2))
    else:
        print(limits)
    return 0


if __name__ == "__main__":
    sys.exit(main())

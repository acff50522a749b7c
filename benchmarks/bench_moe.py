"""The MoE operator alone, against the machine's limits measured beside it.

    python benchmarks/bench_moe.py --shape qwen3-30b-a3b --formats int4-g32,k4,bf16 --threads 2

``--json`` prints what ``benchmarks/results/moe-SHAPE-tTHREADS.json`` holds.

Several layers of experts are kept and each call takes the next one with freshly drawn routing, so
that weights come from DRAM. Every measurement stands between two bandwidth probes and two compute
probes (integer dots for integer formats, bfloat16 products for float formats), and its fractions
are of their mean; medians over the rounds are reported, without those within which the bandwidth
itself changed (as far as three times as many rounds give enough).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from limits import Probes
from moestro import __version__, formats, native
from moestro.memory.expert_bank import BlobLayout

#: a round counts if the read probes before and after it differ by less than this part
STEADY = 0.1
#: routings that a round goes through with one token; more tokens need fewer
DRAWS = 8


@dataclass(frozen=True, kw_only=True)
class Shape:
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int


SHAPES = {
    "qwen3-30b-a3b": Shape(hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8),
    # 32 of the 256 experts: the same bytes per token at a memory this machine has
    "deepseek-v3": Shape(hidden_size=7168, intermediate_size=2048, num_experts=32, top_k=8),
    "mixtral-8x7b": Shape(hidden_size=4096, intermediate_size=14336, num_experts=8, top_k=2),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    tokens: int
    us_per_layer: float
    weight_gb_s: float
    read_gb_s: float
    gops: float
    frac_of_read_bw: float
    frac_of_dot_peak: float | None  # of integer formats
    frac_of_bf16_peak: float | None  # of float formats


class Layers:
    """Packed experts of several layers, all different memory, and one recorded op per layer."""

    def __init__(self, shape: Shape, format_name: str, layers: int, tokens: int) -> None:
        self.shape, self.tokens = shape, tokens
        self.is_float = formats.get(format_name).is_float
        hidden, inter = shape.hidden_size, shape.intermediate_size
        sizes = [
            (format_name, inter, hidden),
            (format_name, inter, hidden),
            (format_name, hidden, inter),
        ]
        self.layout = BlobLayout.plan(sizes)
        self.part_bytes = sum(formats.get(f).nbytes(r, c) for f, r, c in sizes)
        expert = torch.empty(self.layout.nbytes, dtype=torch.uint8)
        self.layout.fill(expert, [formats.get(f).example(r, c) for f, r, c in sizes])
        self.banks: list[Tensor] = []
        for _ in range(layers):
            bank = torch.from_numpy(native.allocate_bytes(shape.num_experts * self.layout.nbytes))
            bank.view(shape.num_experts, -1).copy_(expert)
            self.banks.append(bank)

    def record(self, tokens: int) -> MoeRun:
        return MoeRun(self, tokens)


class MoeRun:
    """Programs over all layers for a fixed number of tokens, each with a routing of its own: what
    one token passes in a few layers would partly stay in a large cache.
    """

    def __init__(self, layers: Layers, tokens: int) -> None:
        shape = layers.shape
        self.layers, self.tokens = layers, tokens
        self.x = torch.randn(tokens, shape.hidden_size)
        self.out = torch.zeros(tokens, shape.hidden_size)
        self.rows = torch.tensor([tokens], dtype=torch.int32)
        self.weights = torch.full((tokens, shape.top_k), 1.0 / shape.top_k)
        self.ids: list[Tensor] = []
        self.programs = [self._record() for _ in range(max(1, DRAWS // tokens))]

    def _record(self) -> native.Program:
        layers, shape = self.layers, self.layers.shape
        program = native.Program()
        projections = [(p.format_name, p.rows, p.cols, p.offset) for p in layers.layout.projections]
        for bank in layers.banks:
            ids = torch.zeros(self.tokens, shape.top_k, dtype=torch.int32)
            pointers = bank.data_ptr() + layers.layout.nbytes * torch.arange(shape.num_experts)
            native.core.moe(
                program, self.x, ids, self.weights, pointers, projections, "silu", self.out,
                self.rows,
            )  # fmt: skip
            self.ids.append(ids)
        return program

    def draw(self, generator: torch.Generator) -> float:
        """New uniform routing for every layer; returns the weight bytes of the distinct experts of
        a program, in the mean.
        """
        shape, total = self.layers.shape, 0
        for ids in self.ids:
            scores = torch.rand(self.tokens, shape.num_experts, generator=generator)
            ids.copy_(scores.topk(shape.top_k, dim=1).indices.int())
            total += ids.unique().numel() * self.layers.part_bytes
        return total / len(self.programs)

    def seconds(self, repeats: int) -> float:
        """Of one program: the mean of ``repeats`` replays of each, in turns."""
        start = time.perf_counter()
        for _ in range(repeats):
            for program in self.programs:
                program.replay()
        return (time.perf_counter() - start) / repeats / len(self.programs)


def measure(layers: Layers, tokens: int, probes: Probes, rounds: int) -> Row:
    run = layers.record(tokens)
    shape, count = layers.shape, len(layers.banks)
    generator = torch.Generator().manual_seed(tokens)
    run.draw(generator)
    repeats = max(1, int(0.1 / len(run.programs) / run.seconds(1)))
    operations = 2 * 3 * tokens * shape.top_k * shape.hidden_size * shape.intermediate_size * count
    samples: list[tuple[float, ...]] = []
    unsteady: list[tuple[float, ...]] = []
    probe = probes.bf16 if layers.is_float else probes.dot
    read, peak = probes.read(), probe()
    while len(samples) < rounds and len(samples) + len(unsteady) < 3 * rounds:
        nbytes = run.draw(generator)
        seconds = run.seconds(repeats)
        read_after, peak_after = probes.read(), probe()
        read_mean, peak_mean = (read + read_after) / 2, (peak + peak_after) / 2
        steady = abs(read - read_after) < STEADY * read_mean
        (samples if steady else unsteady).append(
            (seconds, nbytes / seconds, read_mean, nbytes / seconds / read_mean,
             operations / seconds / peak_mean)
        )  # fmt: skip
        read, peak = read_after, peak_after
    seconds, rate, read, of_read, of_peak = (
        statistics.median(column) for column in zip(*(samples or unsteady), strict=True)
    )
    return Row(
        tokens=tokens,
        us_per_layer=seconds / count * 1e6,
        weight_gb_s=rate / 1e9,
        read_gb_s=read / 1e9,
        gops=operations / seconds / 1e9,
        frac_of_read_bw=of_read,
        frac_of_dot_peak=None if layers.is_float else of_peak,
        frac_of_bf16_peak=of_peak if layers.is_float else None,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument(
        "--formats", default=formats.DEFAULT, metavar="NAMES", help="comma-separated"
    )
    parser.add_argument("--tokens", default="1,4,16,64,512", help="comma-separated batch sizes")
    parser.add_argument("--layers", type=int, default=4, help="layers of weights in memory")
    parser.add_argument("--threads", type=int, default=0, help="0: all the process may use")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    return parser.parse_args()


def main() -> int:
    options = parse()
    native.set_threads(options.threads or len(os.sched_getaffinity(0)))
    torch.set_num_threads(1)  # its idle threads spin on the cores that are measured
    shape = SHAPES[options.shape]
    tokens = [int(n) for n in options.tokens.split(",")]
    probes = Probes()
    for probe in (probes.dot, probes.fma, probes.bf16):
        probe()
    measured = {}
    for name in options.formats.split(","):
        layers = Layers(shape, name, options.layers, max(tokens))
        measured[name] = [measure(layers, n, probes, options.rounds) for n in tokens]
        if not options.json:
            show(name, measured[name])
        del layers
    limits = probes.summary()
    if not options.json:
        print(f"shape {options.shape}, {limits}")
        return 0
    report = {
        "moestro": __version__,
        "shape": options.shape,
        **asdict(shape),
        "layers": options.layers,
        "limits": limits.as_dict(),
        "formats": {name: [asdict(row) for row in rows] for name, rows in measured.items()},
    }
    print(json.dumps(report, indent=1))
    return 0


def show(name: str, rows: list[Row]) -> None:
    """One line per number of tokens."""
    for row in rows:
        of_peak, peak = (
            (row.frac_of_bf16_peak, "bf16")
            if row.frac_of_dot_peak is None
            else (row.frac_of_dot_peak, "dot")
        )
        print(
            f"{name:10} {row.tokens:4} tokens {row.us_per_layer:9.0f} us/layer "
            f"{row.weight_gb_s:5.1f} GB/s {row.gops:5.0f} GOP/s  {row.frac_of_read_bw:6.1%} of "
            f"read ({row.read_gb_s:.0f} GB/s) {of_peak:6.1%} of {peak}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())

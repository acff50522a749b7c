"""The MoE operator alone, against the machine's limits measured beside it.

    python benchmarks/bench_moe.py --shape qwen3-30b-a3b --format int4-g32 --tokens 1,4,16,64,512

Several layers of experts are kept and each call takes the next one with freshly drawn routing, so
that weights come from DRAM. Every measurement stands between two bandwidth probes and two compute
probes (integer dots for integer formats, bfloat16 products for float formats), and its fractions
are of their mean; medians over the rounds are reported.
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
from moestro.memory.expert_bank import BlobLayout


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
    """One Program over all layers for a fixed number of tokens."""

    def __init__(self, layers: Layers, tokens: int) -> None:
        shape = layers.shape
        self.layers, self.tokens = layers, tokens
        self.x = torch.randn(tokens, shape.hidden_size)
        self.out = torch.zeros(tokens, shape.hidden_size)
        self.rows = torch.tensor([tokens], dtype=torch.int32)
        self.ids = [torch.zeros(tokens, shape.top_k, dtype=torch.int32) for _ in layers.banks]
        self.weights = torch.full((tokens, shape.top_k), 1.0 / shape.top_k)
        self.program = native.Program()
        projections = [(p.format_name, p.rows, p.cols, p.offset) for p in layers.layout.projections]
        for bank, ids in zip(layers.banks, self.ids, strict=True):
            pointers = bank.data_ptr() + layers.layout.nbytes * torch.arange(shape.num_experts)
            native.core.moe(
                self.program, self.x, ids, self.weights, pointers, projections, "silu", self.out,
                self.rows,
            )  # fmt: skip

    def draw(self, generator: torch.Generator) -> int:
        """New uniform routing for every layer; returns the weight bytes of the distinct experts."""
        shape, total = self.layers.shape, 0
        for ids in self.ids:
            scores = torch.rand(self.tokens, shape.num_experts, generator=generator)
            ids.copy_(scores.topk(shape.top_k, dim=1).indices.int())
            total += ids.unique().numel() * self.layers.part_bytes
        return total


def measure(layers: Layers, tokens: int, probes: Probes, rounds: int) -> Row:
    run = layers.record(tokens)
    shape, count = layers.shape, len(layers.banks)
    generator = torch.Generator().manual_seed(tokens)
    run.draw(generator)
    once = replay_seconds(run.program, 1)
    repeats = max(1, int(0.1 / once))
    operations = 2 * 3 * tokens * shape.top_k * shape.hidden_size * shape.intermediate_size * count
    samples: list[tuple[float, float, float, float]] = []
    probe = probes.bf16 if layers.is_float else probes.dot
    read, peak = probes.read(), probe()
    for _ in range(rounds):
        nbytes = run.draw(generator)
        seconds = replay_seconds(run.program, repeats)
        read_after, peak_after = probes.read(), probe()
        samples.append(
            (seconds, nbytes / seconds, nbytes / seconds / ((read + read_after) / 2),
             operations / seconds / ((peak + peak_after) / 2))
        )  # fmt: skip
        read, peak = read_after, peak_after
    seconds, rate, of_read, of_peak = (
        statistics.median(column) for column in zip(*samples, strict=True)
    )
    return Row(
        tokens=tokens,
        us_per_layer=seconds / count * 1e6,
        weight_gb_s=rate / 1e9,
        gops=operations / seconds / 1e9,
        frac_of_read_bw=of_read,
        frac_of_dot_peak=None if layers.is_float else of_peak,
        frac_of_bf16_peak=of_peak if layers.is_float else None,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument(
        "--format", default=formats.DEFAULT, choices=formats.names(), metavar="NAME"
    )
    parser.add_argument("--tokens", default="1,4,16,64,512", help="comma-separated batch sizes")
    parser.add_argument("--layers", type=int, default=4, help="layers of weights in memory")
    parser.add_argument("--threads", type=int, default=0, help="0: all the process may use")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.threads:
        native.set_threads(options.threads)
    else:
        native.set_threads(len(os.sched_getaffinity(0)))
    torch.set_num_threads(1)  # its idle threads spin on the cores that are measured
    shape = SHAPES[options.shape]
    tokens = [int(n) for n in options.tokens.split(",")]
    layers = Layers(shape, options.format, options.layers, max(tokens))
    probes = Probes()
    for probe in (probes.dot, probes.fma, probes.bf16):
        probe()
    rows = [measure(layers, n, probes, options.rounds) for n in tokens]
    limits = probes.summary()
    if options.json:
        report = {
            "moestro": __version__,
            "shape": options.shape,
            **asdict(shape),
            "format": options.format,
            "layers": options.layers,
            "limits": limits.as_dict(),
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps(report, indent=2))
        return 0
    print(f"{options.shape} {options.format}, {limits}")
    peak = "bf16" if layers.is_float else "dot"
    for row in rows:
        of_peak = row.frac_of_bf16_peak if layers.is_float else row.frac_of_dot_peak
        print(
            f"{row.tokens:5d} tokens {row.us_per_layer:10.0f} us/layer {row.weight_gb_s:6.1f} GB/s "
            f"{row.gops:7.0f} GOP/s  {row.frac_of_read_bw:5.1%} of read  "
            f"{of_peak:5.1%} of {peak} peak"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

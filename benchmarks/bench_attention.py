"""Paged attention alone: decode against read bandwidth, prefill against the float32 FMA peak.

    python benchmarks/bench_attention.py --heads 32 --kv-heads 4 --head-dim 128 --dtype bfloat16

Decode takes one token per call and walks through the caches of as many layers as fit in
``--cache-mib``, so that long contexts come from DRAM. Every measurement stands between two probes
of the limit it is compared with; medians over the rounds are reported.
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

from limits import Probes
from moestro import native
from moestro.devices.cpu.ops import CpuOps
from moestro.ops.contracts import Batch, KvLayer

PAGE_SIZE = 64
#: (kind, tokens of the step, context length at its end)
CASES = [
    ("decode", 1, 1024),
    ("decode", 1, 16384),
    ("prefill", 512, 512),
    ("prefill", 512, 4096),
]


@dataclass(frozen=True, kw_only=True)
class Heads:
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def cache_nbytes(self, context: int) -> int:
        """Bytes of keys and values that one decode step reads."""
        return 2 * context * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Row:
    kind: str
    tokens: int
    context: int
    us_per_layer: float
    cache_gb_s: float
    gflop_s: float
    frac_of_read_bw: float
    frac_of_fma_peak: float


class Run:
    """One recorded attention op per layer over its own random cache."""

    def __init__(self, shape: Heads, tokens: int, context: int, layers: int) -> None:
        pages = -(-context // PAGE_SIZE)
        self.batch = Batch.allocate(tokens=tokens, slots=1, pages_per_slot=pages, logits=1)
        self.batch.counts[0] = tokens
        self.batch.page_table.copy_(torch.randperm(pages)[None])
        self.batch.positions.copy_(torch.arange(context - tokens, context))
        q = torch.randn(tokens, shape.heads * shape.head_dim)
        out = torch.empty_like(q)
        ops = CpuOps()
        with ops.record() as self.program:
            for _ in range(layers):
                k = torch.randn(pages, shape.kv_heads, PAGE_SIZE // 16, shape.head_dim, 16)
                v = torch.randn(pages, shape.kv_heads, PAGE_SIZE, shape.head_dim)
                cache = KvLayer(k=k.to(shape.dtype), v=v.to(shape.dtype))
                scale = shape.head_dim**-0.5
                ops.attention(q, cache, out, self.batch, heads=shape.heads, scale=scale)

    def seconds(self, repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            self.program.replay()
        return (time.perf_counter() - start) / repeats


def measure(
    shape: Heads, case: tuple[str, int, int], cache_mib: int, probes: Probes, rounds: int
) -> Row:
    kind, tokens, context = case
    nbytes = shape.cache_nbytes(context)
    layers = max(1, min(64, (cache_mib << 20) // nbytes)) if kind == "decode" else 1
    run = Run(shape, tokens, context, layers)
    pairs = sum(range(context - tokens + 1, context + 1))  # (query, key) pairs under the diagonal
    operations = 4 * pairs * shape.heads * shape.head_dim
    repeats = max(1, int(0.1 / run.seconds(1)))
    samples: list[tuple[float, float, float]] = []
    read, fma = probes.read(), probes.fma()
    for _ in range(rounds):
        seconds = run.seconds(repeats) / layers
        read_after, fma_after = probes.read(), probes.fma()
        of_read = nbytes / seconds / ((read + read_after) / 2)
        of_fma = operations / seconds / ((fma + fma_after) / 2)
        samples.append((seconds, of_read, of_fma))
        read, fma = read_after, fma_after
    seconds, of_read, of_fma = (statistics.median(column) for column in zip(*samples, strict=True))
    return Row(
        kind=kind,
        tokens=tokens,
        context=context,
        us_per_layer=seconds * 1e6,
        cache_gb_s=nbytes / seconds / 1e9,
        gflop_s=operations / seconds / 1e9,
        frac_of_read_bw=of_read,
        frac_of_fma_peak=of_fma,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--cache-mib", type=int, default=512, help="memory for decode caches")
    parser.add_argument("--threads", type=int, default=0, help="0: all the process may use")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    return parser.parse_args()


def main() -> int:
    options = parse()
    native.set_threads(options.threads or len(os.sched_getaffinity(0)))
    shape = Heads(
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        dtype=getattr(torch, options.dtype),
    )
    probes = Probes()
    rows = [measure(shape, case, options.cache_mib, probes, options.rounds) for case in CASES]
    if options.json:
        described = asdict(shape) | {"dtype": options.dtype}
        report = described | {"isa": native.isa(), "threads": native.threads()}
        print(json.dumps(report | {"rows": [asdict(row) for row in rows]}, indent=2))
        return 0
    print(
        f"{shape.heads} heads / {shape.kv_heads} kv heads x {shape.head_dim}, {options.dtype}, "
        f"{native.isa()}, {native.threads()} threads"
    )
    for row in rows:
        print(
            f"{row.kind:7s} {row.tokens:4d} at {row.context:5d} {row.us_per_layer:9.0f} us/layer "
            f"{row.cache_gb_s:6.1f} GB/s {row.gflop_s:6.0f} GFLOP/s  "
            f"{row.frac_of_read_bw:6.1%} of read  {row.frac_of_fma_peak:6.1%} of FMA peak"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

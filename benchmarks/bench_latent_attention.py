"""Multi-head latent attention alone, against the float32 FMA peak and the read bandwidth.

    python benchmarks/bench_latent_attention.py --heads 128 --rank 512 --rope 64 --dtype bfloat16

Per layer: the attention over the compressed rows, and the two products per head around it, with
bfloat16 weights. Every measurement stands between two probes of each limit; medians over the rounds
are reported. With one thread the thread's own CPU time is taken, so that other programs on the
machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from limits import Probes
from moestro import formats, native
from moestro.devices.cpu.ops import CpuOps
from moestro.formats.base import PackedWeight
from moestro.nn.kv_cache import allocate_latent
from moestro.ops.contracts import Batch

PAGE_SIZE = 64
#: (tokens of the step, context length at its end)
CASES = [(1, 1024), (1, 16384), (512, 512), (512, 4096)]


@dataclass(frozen=True, kw_only=True)
class Shape:
    heads: int
    rank: int
    rope: int
    nope: int
    value: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Row:
    """One op: its time, and its operations and bytes against the limits."""

    op: str
    tokens: int
    context: int
    us: float
    gflop_s: float
    frac_of_fma_peak: float
    frac_of_read_bw: float


def packed(rows: int, cols: int) -> PackedWeight:
    bf16 = formats.get("bf16")
    return PackedWeight(bf16, rows, cols, bf16.pack(torch.randn(rows, cols)))


def ops_of(
    shape: Shape, tokens: int, context: int
) -> dict[str, tuple[Callable[[], None], int, int]]:
    """By name: a call, its float operations, and the bytes it cannot help reading."""
    pages = -(-context // PAGE_SIZE)
    batch = Batch.allocate(tokens=tokens, slots=1, pages_per_slot=pages, logits=1)
    batch.counts[0] = tokens
    batch.page_table.copy_(torch.randperm(pages)[None])
    batch.positions.copy_(torch.arange(context - tokens, context))
    cache = allocate_latent(
        pages=pages, page_size=PAGE_SIZE, rank=shape.rank, rope_dim=shape.rope, dtype=shape.dtype
    )
    cache.rows.copy_(torch.randn(cache.rows.shape))
    heads, rank = shape.heads, shape.rank
    q = torch.randn(tokens, heads * (shape.nope + shape.rope))
    absorbed, out = torch.randn(tokens, heads * rank), torch.zeros(tokens, heads * rank)
    mixed = torch.zeros(tokens, heads * shape.value)
    keys, values = packed(heads * rank, shape.nope), packed(heads * shape.value, rank)
    ops = CpuOps()
    pairs = sum(range(context - tokens + 1, context + 1))  # (query, key) pairs under the diagonal
    scale = (rank + shape.rope) ** -0.5
    return {
        "keys per head": (
            lambda: ops.linear_heads(q, keys, absorbed, batch.rows, heads=heads),
            2 * tokens * heads * rank * shape.nope,
            keys.nbytes,
        ),
        "attention": (
            lambda: ops.latent_attention(q, absorbed, cache, out, batch, heads=heads, scale=scale),
            2 * pairs * heads * (2 * rank + shape.rope),
            context * cache.width * shape.dtype.itemsize,
        ),
        "values per head": (
            lambda: ops.linear_heads(out, values, mixed, batch.rows, heads=heads),
            2 * tokens * heads * rank * shape.value,
            values.nbytes,
        ),
    }


def seconds(call: Callable[[], None], repeats: int) -> float:
    clock = time.thread_time if native.threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def measure(shape: Shape, tokens: int, context: int, probes: Probes, rounds: int) -> list[Row]:
    rows = []
    for name, (call, operations, nbytes) in ops_of(shape, tokens, context).items():
        repeats = max(1, int(0.1 / seconds(call, 1)))
        samples: list[tuple[float, float, float]] = []
        read, fma = probes.read(), probes.fma()
        for _ in range(rounds):
            taken = seconds(call, repeats)
            read_after, fma_after = probes.read(), probes.fma()
            of_fma = operations / taken / ((fma + fma_after) / 2)
            of_read = nbytes / taken / ((read + read_after) / 2)
            samples.append((taken, of_fma, of_read))
            read, fma = read_after, fma_after
        taken, of_fma, of_read = (statistics.median(c) for c in zip(*samples, strict=True))
        rows.append(
            Row(
                op=name,
                tokens=tokens,
                context=context,
                us=taken * 1e6,
                gflop_s=operations / taken / 1e9,
                frac_of_fma_peak=of_fma,
                frac_of_read_bw=of_read,
            )
        )
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("heads", 128), ("rank", 512), ("rope", 64), ("nope", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--value", type=int, default=128, help="output channels of a head")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=0, help="0: all the process may use")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    return parser.parse_args()


def main() -> int:
    options = parse()
    native.set_threads(options.threads or len(os.sched_getaffinity(0)))
    shape = Shape(
        heads=options.heads,
        rank=options.rank,
        rope=options.rope,
        nope=options.nope,
        value=options.value,
        dtype=getattr(torch, options.dtype),
    )
    probes = Probes()
    rows = [row for case in CASES for row in measure(shape, *case, probes, options.rounds)]
    if options.json:
        described = asdict(shape) | {"dtype": options.dtype}
        report = described | {"isa": native.isa(), "threads": native.threads()}
        print(json.dumps(report | {"rows": [asdict(row) for row in rows]}, indent=2))
        return 0
    print(
        f"{shape.heads} heads over rows of {shape.rank} + {shape.rope}, {options.dtype}, "
        f"{native.isa()}, {native.threads()} threads"
    )
    for row in rows:
        print(
            f"{row.op:16s} {row.tokens:4d} at {row.context:5d} {row.us:9.0f} us "
            f"{row.gflop_s:6.0f} GFLOP/s  {row.frac_of_fma_peak:6.1%} of FMA peak  "
            f"{row.frac_of_read_bw:6.1%} of read"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

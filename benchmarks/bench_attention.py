"""Paged attention alone: decode against read bandwidth, prefill against the peaks of products.

    python benchmarks/bench_attention.py --heads 32 --kv-heads 4 --head-dim 128

Decode takes one token per call and walks through the caches of as many layers as fit in
``--cache-mib``, so that they come from DRAM. Every measurement stands between two probes of the
limits it is compared with; medians over the rounds are reported. The peak of products is that of
the instructions the cache's kernels use: float32 FMA, bfloat16 pairs where the instruction set has
them, integer dots for int8.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass

import torch

from limits import Probes, replay_seconds
from moestro import native
from moestro.devices.cpu.ops import CpuOps
from moestro.nn.kv_cache import allocate_kv, position_nbytes
from moestro.ops.contracts import Batch, KvLayer

PAGE_SIZE = 64
DTYPES = ["float32", "float16", "bfloat16", "int8"]
#: (kind, tokens of the step, context length at its end)
CASES = [
    ("decode", 1, 512),
    ("decode", 1, 4096),
    ("decode", 1, 16384),
    ("decode", 1, 65536),
    ("prefill", 512, 512),
    ("prefill", 4096, 4096),
    ("prefill", 512, 16384),
]


@dataclass(frozen=True, kw_only=True)
class Heads:
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def cache_nbytes(self, context: int) -> int:
        """Bytes of keys and values that one decode step reads."""
        return context * self.kv_heads * position_nbytes(self.head_dim, self.dtype)


@dataclass(frozen=True, kw_only=True)
class Row:
    dtype: str
    kind: str
    tokens: int
    context: int
    us_per_layer: float
    us_min: float
    us_max: float
    cache_gb_s: float
    gop_s: float
    frac_of_read_bw: float
    frac_of_fma_peak: float
    frac_of_product_peak: float


def random_cache(shape: Heads, pages: int) -> KvLayer:
    cache = allocate_kv(
        pages=pages,
        page_size=PAGE_SIZE,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
    )
    if cache.k_scale is None or cache.v_scale is None:
        for tensor in (cache.k, cache.v):
            tensor.copy_(torch.randn(tensor.shape))
    else:
        for codes, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
            codes.random_(1, 256)
            scale.fill_(0.01)
    return cache


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
                cache, scale = random_cache(shape, pages), shape.head_dim**-0.5
                ops.attention(q, cache, out, self.batch, heads=shape.heads, scale=scale)


def measure(
    shape: Heads, case: tuple[str, int, int], cache_mib: int, probes: Probes, rounds: int
) -> Row:
    kind, tokens, context = case
    nbytes = shape.cache_nbytes(context)
    layers = max(1, min(64, (cache_mib << 20) // nbytes)) if kind == "decode" else 1
    run = Run(shape, tokens, context, layers)
    pairs = sum(range(context - tokens + 1, context + 1))  # (query, key) pairs under the diagonal
    operations = 4 * pairs * shape.heads * shape.head_dim
    repeats = max(1, int(0.1 / replay_seconds(run.program, 1)))
    samples: list[tuple[float, ...]] = []
    before = limits(shape.dtype, probes)
    for _ in range(rounds):
        seconds = replay_seconds(run.program, repeats) / layers
        after = limits(shape.dtype, probes)
        read, fma, product = ((x + y) / 2 for x, y in zip(before, after, strict=True))
        rate = operations / seconds
        samples.append((seconds, nbytes / seconds / read, rate / fma, rate / product))
        before = after
    seconds, of_read, of_fma, of_product = map(statistics.median, zip(*samples, strict=True))
    return Row(
        dtype=str(shape.dtype).removeprefix("torch."),
        kind=kind,
        tokens=tokens,
        context=context,
        us_per_layer=seconds * 1e6,
        us_min=min(samples)[0] * 1e6,
        us_max=max(samples)[0] * 1e6,
        cache_gb_s=nbytes / seconds / 1e9,
        gop_s=operations / seconds / 1e9,
        frac_of_read_bw=of_read,
        frac_of_fma_peak=of_fma,
        frac_of_product_peak=of_product,
    )


def limits(dtype: torch.dtype, probes: Probes) -> tuple[float, float, float]:
    """Read bytes, float32 operations, and operations of the cache's own products, per second."""
    read, fma = probes.read(), probes.fma()
    if dtype == torch.int8:
        return read, fma, probes.dot()
    return read, fma, probes.bf16() if dtype == torch.bfloat16 else fma


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtypes", default="float16,bfloat16,int8", help=f"of {','.join(DTYPES)}")
    parser.add_argument("--cases", default="", help="such as decode@16384,512@4096; default: all")
    parser.add_argument("--cache-mib", type=int, default=512, help="memory for decode caches")
    parser.add_argument("--threads", type=int, default=0, help="0: all the process may use")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    return parser.parse_args()


def chosen_cases(wanted: str) -> list[tuple[str, int, int]]:
    """``decode@CONTEXT`` and ``TOKENS@CONTEXT``, separated by commas."""
    if not wanted:
        return CASES
    cases = []
    for item in wanted.split(","):
        tokens, _, context = item.partition("@")
        kind = "decode" if tokens == "decode" else "prefill"
        cases.append((kind, 1 if kind == "decode" else int(tokens), int(context)))
    return cases


def main() -> int:
    options = parse()
    native.set_threads(options.threads or len(os.sched_getaffinity(0)))
    probes, rows = Probes(), []
    for dtype in options.dtypes.split(","):
        shape = Heads(
            heads=options.heads,
            kv_heads=options.kv_heads,
            head_dim=options.head_dim,
            dtype=getattr(torch, dtype),
        )
        for case in chosen_cases(options.cases):
            row = measure(shape, case, options.cache_mib, probes, options.rounds)
            rows.append(row)
            if not options.json:
                print(line(row), flush=True)
    if options.json:
        heads = {"heads": options.heads, "kv_heads": options.kv_heads, "head_dim": options.head_dim}
        measured = {"limits": probes.summary().as_dict(), "rows": [asdict(row) for row in rows]}
        print(json.dumps(heads | measured, indent=2))
    else:
        print(
            f"{options.heads} heads / {options.kv_heads} kv heads x {options.head_dim}, "
            f"{native.isa()}, {native.threads()} threads"
        )
    return 0


def line(row: Row) -> str:
    return (
        f"{row.dtype:8s} {row.kind:7s} {row.tokens:4d} at {row.context:5d} "
        f"{row.us_per_layer:9.0f} us/layer {row.cache_gb_s:6.1f} GB/s {row.gop_s:6.0f} GOP/s  "
        f"{row.frac_of_read_bw:6.1%} of read  {row.frac_of_fma_peak:6.1%} of FMA peak  "
        f"{row.frac_of_product_peak:6.1%} of product peak"
    )


if __name__ == "__main__":
    sys.exit(main())

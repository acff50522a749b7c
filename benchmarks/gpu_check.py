"""Checks the accelerator's kernels on the card of this machine, and times them.

python benchmarks/gpu_check.py             # the tests of tests/gpu, then times; under three minutes
python benchmarks/gpu_check.py --no-tests

Times stand beside what this very card does at best: copying memory, and multiplying bfloat16
matrices. Experts are drawn anew for every call of a captured graph, so weights come from memory.
Without a card it says so, and exits with status 0.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
FORMATS = ("int4-g32", "int8-g32", "k4", "k6", "mxfp4", "bf16", "fp8-g128")
#: hidden_size, moe_intermediate_size, experts, top_k of a model whose layers hold 128 small experts
HIDDEN, INTER, EXPERTS, TOP_K = 2048, 768, 128, 8
TOKENS = (1, 4, 16, 512)
CALLS = 8


@dataclass(frozen=True)
class Limits:
    """What the card does at best: bytes read and written per second, floating point operations."""

    copy: float
    matmul: float


@dataclass(frozen=True)
class Weight:
    """A packed matrix of random bytes."""

    format_name: str
    rows: int
    cols: int
    data: Tensor
    input_order: Tensor | None = None

    def unpack(self) -> Tensor:
        raise NotImplementedError


def seconds(run: Callable[[], None]) -> float:
    """Of one run, the best of some replays of it as a captured graph."""
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    best = float("inf")
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1000)
    return best


def measure_limits() -> Limits:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / seconds(lambda: target.copy_(source))
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    matmul = 2 * size**3 / seconds(lambda: torch.mm(a, b, out=out))
    return Limits(copy, matmul)


def report(
    what: str, name: str, tokens: int, time: float, read: int, flops: int, at: Limits
) -> None:
    print(
        f"{what:<8} {name:<9} {tokens:>6} {time * 1e6:>9.1f} "
        f"{read / time / 1e9:>8.0f} {read / time / at.copy:>6.2f} "
        f"{flops / time / 1e12:>8.1f} {flops / time / at.matmul:>6.2f}",
        flush=True,
    )


def time_linear(name: str, tokens: int, at: Limits) -> None:
    from moestro import formats  # noqa: PLC0415, after the card was found
    from moestro.devices.cuda.ops import CudaOps  # noqa: PLC0415

    rows, cols = 8192, 4096
    nbytes = formats.get(name).nbytes(rows, cols)
    weights = [
        Weight(name, rows, cols, torch.randint(0, 64, (nbytes,), dtype=torch.uint8, device="cuda"))
        for _ in range(CALLS)
    ]
    x, out = torch.randn(tokens, cols, device="cuda"), torch.empty(tokens, rows, device="cuda")
    live, ops = torch.tensor([tokens], dtype=torch.int32, device="cuda"), CudaOps(dot())

    def run() -> None:
        for weight in weights:
            ops.linear(x, weight, out, live)

    time = seconds(run) / CALLS
    report("linear", name, tokens, time, nbytes, 2 * tokens * rows * cols, at)


def time_moe(name: str, tokens: int, at: Limits) -> None:
    from moestro.devices.cuda.ops import CudaOps  # noqa: PLC0415
    from moestro.memory.expert_bank import BlobLayout  # noqa: PLC0415

    layout = BlobLayout.plan([(name, INTER, HIDDEN), (name, INTER, HIDDEN), (name, HIDDEN, INTER)])
    buffer = torch.randint(0, 64, (layout.nbytes * EXPERTS,), dtype=torch.uint8, device="cuda")
    starts = torch.arange(EXPERTS, dtype=torch.int64, device="cuda") * layout.nbytes
    table = Table(layout.projections, buffer.data_ptr() + starts)
    x, out = (torch.randn(tokens, HIDDEN, device="cuda") for _ in range(2))
    chosen = [torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K, dim=1) for _ in range(CALLS)]
    ids = [found.indices.int() for found in chosen]
    live, ops = torch.tensor([tokens], dtype=torch.int32, device="cuda"), CudaOps(dot())

    def run() -> None:
        for found, which in zip(chosen, ids, strict=True):
            ops.moe(x, which, found.values, table, out, live)

    read = sum(which.unique().numel() for which in ids) * layout.nbytes // CALLS
    time = seconds(run) / CALLS
    report("moe", name, tokens, time, read, 6 * tokens * TOP_K * HIDDEN * INTER, at)


@dataclass(frozen=True)
class Table:
    """Experts of random bytes."""

    projections: tuple
    pointers: Tensor
    activation: str = "silu"
    biases: None = None
    input_orders: None = None

    def expert(self, index: int) -> tuple:
        raise NotImplementedError


def time_attention(tokens: int, context: int, at: Limits) -> None:
    from moestro.devices.cuda.ops import CudaOps  # noqa: PLC0415
    from moestro.ops.contracts import Batch, KvLayer  # noqa: PLC0415

    heads, kv_heads, depth, page = 32, 4, 128, 64
    pages = context // page
    shape = (tokens * pages, kv_heads, page // 16, depth, 16)
    caches = [
        KvLayer(
            k=torch.randn(shape, device="cuda", dtype=torch.bfloat16),
            v=torch.randn((*shape[:2], page, depth), device="cuda", dtype=torch.bfloat16),
        )
        for _ in range(2)
    ]
    batch = Batch(
        counts=torch.tensor([tokens, 0], dtype=torch.int32, device="cuda"),
        token_ids=torch.zeros(tokens, dtype=torch.int32, device="cuda"),
        positions=torch.full((tokens,), context - 1, dtype=torch.int32, device="cuda"),
        slots=torch.arange(tokens, dtype=torch.int32, device="cuda"),
        page_table=torch.randperm(tokens * pages, device="cuda").int().view(tokens, pages),
        logit_rows=torch.zeros(1, dtype=torch.int32, device="cuda"),
    )
    q = torch.randn(tokens, heads * depth, device="cuda")
    out, ops = torch.empty_like(q), CudaOps(dot())

    def run() -> None:
        for cache in caches:
            ops.attention(q, cache, out, batch, heads=heads, scale=depth**-0.5)

    time = seconds(run) / len(caches)
    read = 2 * caches[0].k.nbytes
    flops = 4 * tokens * context * heads * depth
    report("attend", f"{context}", tokens, time, read, flops, at)


def dot() -> str:
    return "dp4a" if torch.version.hip is None else "bytes"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-tests", action="store_true", help="only the times")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no card: torch finds none that it can use, so nothing was checked")
        return 0
    print(f"card: {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    if not given.no_tests:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/gpu"]
        if subprocess.run(command, cwd=ROOT).returncode:
            return 1
    at = measure_limits()
    print(f"copy {at.copy / 1e9:.0f} GB/s, bfloat16 matmul {at.matmul / 1e12:.0f} TFLOP/s")
    print("op       what      tokens        us     GB/s of copy  TFLOP/s of mm")
    for measure in (time_linear, time_moe):
        for name in FORMATS:
            for tokens in TOKENS:
                measure(name, tokens, at)
    for tokens, context in ((1, 4096), (1, 65536), (8, 16384)):
        time_attention(tokens, context, at)
    return 0


if __name__ == "__main__":
    sys.exit(main())

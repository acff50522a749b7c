"""Compiles the accelerator's kernels for cards that are not here, and shows what they take.

python tools/gpu_aot.py             # all of them for all targets, a format of each family
python tools/gpu_aot.py --targets sm_90 --formats k4 --kernels linear

Per kernel, format (of weights, or of the cache), form (few tokens or many) and target: registers
per thread, shared memory per block, and what is spilled to memory (NVIDIA: bytes of stack; AMD:
vector registers). Ops are issued as ever, on a stand-in for the driver that compiles what it should
launch; so these are the very launches of a card.
Stops at what does not compile. Needs triton, no card.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from moestro.devices.cuda import formats
from moestro.devices.cuda.launches import Launch
from moestro.devices.cuda.ops import CudaOps
from moestro.nn.kv_cache import allocate_kv, allocate_latent
from moestro.ops.contracts import Batch, ExpertBiases, Projection

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
}
#: tokens of a batch that goes by words, and of one that goes by matrix units
FORMS = {"few": 1, "many": 512}
HIDDEN, INTER, EXPERTS, TOP_K = 2048, 768, 128, 8


@dataclass(frozen=True)
class Row:
    """What one compiled kernel takes."""

    kernel: str
    format: str
    form: str
    target: str
    registers: int
    shared: int
    spilled: int


class StandIn:
    """What Triton asks of a driver to compile for a target."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target)

    def get_current_stream(self, device: str) -> int:
        return 0


class CompilingOps(CudaOps):
    """Compiles each launch and keeps what it takes."""

    def __init__(self, dot: str, found: Callable[[str, object], None]) -> None:
        super().__init__(dot)
        self.found = found

    def launch(self, launch: Launch) -> None:
        compiled = launch.kernel.warmup(
            **launch.arguments, **launch.constants, **launch.options, grid=launch.grid
        )
        self.found(launch.kernel.__name__, compiled)


@dataclass(frozen=True)
class Matrix:
    """A weight of any bytes: compilation reads none."""

    format_name: str
    rows: int
    cols: int
    data: Tensor
    input_order: Tensor | None = None

    def unpack(self) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Experts:
    """A table of experts that are nowhere."""

    projections: tuple[Projection, Projection, Projection]
    pointers: Tensor
    activation: str = "silu"
    biases: ExpertBiases | None = None
    input_orders: Tensor | None = None

    def expert(self, index: int) -> tuple[Matrix, Matrix, Matrix]:
        raise NotImplementedError


def expert_table(name: str) -> Experts:
    shapes = ((INTER, HIDDEN), (INTER, HIDDEN), (HIDDEN, INTER))
    gate, up, down = (
        Projection(format_name=name, rows=rows, cols=cols, offset=i << 24)
        for i, (rows, cols) in enumerate(shapes)
    )
    return Experts((gate, up, down), torch.zeros(EXPERTS, dtype=torch.int64))


def rows_of(n: int) -> Tensor:
    return torch.tensor([n], dtype=torch.int32)


def issue_linear(ops: CudaOps, name: str, tokens: int) -> None:
    weight = Matrix(name, INTER, HIDDEN, torch.empty(64, dtype=torch.uint8))
    out = torch.empty(tokens, INTER)
    ops.linear(torch.empty(tokens, HIDDEN), weight, out, rows_of(tokens))


def issue_moe(ops: CudaOps, name: str, tokens: int) -> None:
    x, ids = torch.empty(tokens, HIDDEN), torch.zeros(tokens, TOP_K, dtype=torch.int32)
    weights = torch.empty(tokens, TOP_K)
    ops.moe(x, ids, weights, expert_table(name), torch.empty_like(x), rows_of(tokens))


def batch_of(tokens: int) -> Batch:
    return Batch.allocate(tokens=tokens, slots=1, pages_per_slot=512, logits=1)


def issue_attention(ops: CudaOps, dtype: str, tokens: int) -> None:
    cache = allocate_kv(pages=1, page_size=64, kv_heads=4, head_dim=128, dtype=CACHES[dtype])
    q = torch.empty(tokens, 32 * 128)
    ops.attention(q, cache, torch.empty_like(q), batch_of(tokens), heads=32, scale=0.1)


def issue_latent_attention(ops: CudaOps, dtype: str, tokens: int) -> None:
    cache = allocate_latent(pages=1, page_size=64, rank=512, rope_dim=64, dtype=CACHES[dtype])
    q, absorbed = torch.empty(tokens, 128 * 192), torch.empty(tokens, 128 * 512)
    ops.latent_attention(
        q, absorbed, cache, absorbed, batch_of(tokens), heads=128, scale=0.1
    )  # fmt: skip


#: by the op: issuing it for a weight format, or for a type of cache
OF_WEIGHTS = {"linear": issue_linear, "moe": issue_moe}
OF_CACHES = {"attention": issue_attention, "latent_attention": issue_latent_attention}
CACHES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def taken(compiled: object, target: GPUTarget) -> tuple[int, int, int]:
    """(registers per thread, shared bytes per block, spilled) of a compiled kernel."""
    shared = int(compiled.metadata.shared)  # type: ignore[attr-defined]
    asm = compiled.asm  # type: ignore[attr-defined]
    if target.backend == "hip":
        text = asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s+(\d+)", text)
        return registers, shared, _number(r"\.vgpr_spill_count:\s+(\d+)", text)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    return _number(r"REG:(\d+)", text), shared, _number(r"STACK:(\d+)", text)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the compiler's report has no {pattern}")
    return int(match.group(1))


def compile_all(targets: list[str], names: list[str], kernels: list[str]) -> Iterator[Row]:
    """One row per compiled kernel; raises what the compiler raises."""
    for target_name in targets:
        target = TARGETS[target_name]
        driver.set_active(StandIn(target))
        dot = "dp4a" if target.backend == "cuda" else "bytes"
        for kernel in kernels:
            issue = (OF_WEIGHTS | OF_CACHES)[kernel]
            for name in [n for n in names if kernel in OF_WEIGHTS or n in CACHES]:
                for form, tokens in FORMS.items():
                    seen: dict[str, object] = {}
                    issue(CompilingOps(dot, seen.__setitem__), name, tokens)
                    for function, compiled in seen.items():
                        yield Row(function, name, form, target_name, *taken(compiled, target))


def families() -> list[str]:
    """One format of each family: groups of other sizes are other constants of the same code."""
    by_stem = {name.split("-")[0]: name for name in reversed(formats.names())}
    return sorted(by_stem.values())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", default=",".join(TARGETS), help="comma separated")
    parser.add_argument("--formats", default=",".join(families()), help="comma separated")
    parser.add_argument(
        "--kernels", default=",".join(OF_WEIGHTS | OF_CACHES), help="comma separated"
    )
    given = parser.parse_args(arguments)
    head = ("kernel", "format", "form", "target", "registers", "shared", "spilled")
    line = "{:<18} {:<11} {:<5} {:<8} {:>9} {:>7} {:>7}"
    print(line.format(*head))
    lists = (text.split(",") for text in (given.targets, given.formats, given.kernels))
    for row in compile_all(*lists):
        print(line.format(*vars(row).values()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

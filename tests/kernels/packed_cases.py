"""Random and extreme packed matrices, and float64 products of what the integer core multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moestro import formats, native
from moestro.formats.base import PackedWeight

#: the kernel tables of this machine, and the models of others
ISAS = [*native.supported_isas(), *native.emulated_isas()]
FORMATS = [name for name in native.core.format_names() if name in formats.names()]
#: tables that multiply bfloat16 pairs, and the formats they do it for: their activations are
#: rounded to bfloat16, and their bits are their own
PAIR_ISAS = ("avx512_bf16", "amx")
PAIR_FORMATS = tuple(name for name in FORMATS if name == "bf16" or name.startswith("fp8-"))


def multiplies_pairs(isa: str, *names: str) -> bool:
    return isa in PAIR_ISAS and any(name in PAIR_FORMATS for name in names)


def reference_isa(isa: str, *names: str) -> str:
    """The table whose bits, on one thread, a result of these formats on ``isa`` must have."""
    return isa if multiplies_pairs(isa, *names) else "scalar"


def random_weight(name: str, rows: int, cols: int, seed: int = 0) -> PackedWeight:
    """Normal weights in the format's own best rounding."""
    generator = torch.Generator().manual_seed(seed)
    weight = formats.get(name)
    return PackedWeight(
        weight, rows, cols, weight.pack(torch.randn(rows, cols, generator=generator))
    )


def extreme_weight(name: str, rows: int, cols: int) -> PackedWeight:
    """Every code at an end of its range: whole rows at the lowest, the highest, and alternating."""
    pattern = torch.tensor([-1.0, 1.0]).repeat(cols // 2 + 1)[:cols]
    kinds = [-torch.ones(cols), torch.ones(cols), pattern, -pattern, torch.zeros(cols)]
    weight = formats.get(name)
    values = torch.stack([kinds[i % len(kinds)] for i in range(rows)])
    return PackedWeight(weight, rows, cols, weight.pack(values))


def quantized(x: Tensor) -> Tensor:
    """The activations the integer core multiplies, decoded to float64: signed bytes with scale
    amax / 127 per 32 channels, rounded half to even (kernels' stated rule)."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 32))
    groups = padded.view(x.shape[0], -1, 32)
    amax = groups.abs().amax(dim=-1, keepdim=True)
    factor = torch.where(amax >= 1e-30, 127.0 / amax, torch.zeros(()))
    codes = torch.round(groups * factor)
    scale = torch.where(amax >= 1e-30, amax / 127.0, torch.zeros(()))
    return (codes.double() * scale.double()).view(x.shape[0], -1)[:, : x.shape[1]]


def multiplied(name: str, x: Tensor, isa: str | None = None) -> Tensor:
    """What the kernel of this format sees of the activations on ``isa`` (or the one in use),
    float64."""
    if multiplies_pairs(native.isa() if isa is None else isa, name):
        return x.bfloat16().double()
    return x.double() if formats.get(name).is_float else quantized(x)


def rows_of(n: int) -> Tensor:
    return torch.tensor([n], dtype=torch.int32)


def linear(weight: PackedWeight, x: Tensor, **options: object) -> Tensor:
    out = torch.zeros(x.shape[0], weight.rows)
    native.core.linear(
        None, x, weight.format_name, weight.data, weight.rows, weight.cols, out,
        rows_of(x.shape[0]), **options,
    )  # fmt: skip
    return out


@contextmanager
def running(isa: str, threads: int) -> Iterator[None]:
    """One kernel table and team size, restored afterwards."""
    before = native.isa(), native.threads()
    native.set_isa(isa)
    native.set_threads(threads)
    try:
        yield
    finally:
        native.set_isa(before[0])
        native.set_threads(before[1])

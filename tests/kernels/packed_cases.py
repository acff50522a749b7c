"""Random and extreme packed matrices, and float64 products of what the integer core multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from moestro import formats, native
from moestro.formats.base import PackedWeight

#: the kernel tables of this machine, and the models of others
ISAS = [*native.supported_isas(), *native.emulated_isas()]
FORMATS = [name for name in native.core.format_names() if name in formats.names()]
#: tables that multiply bfloat16 pairs, and the formats they do it for: their activations are
#: rounded to bfloat16, and their bits are their own
PAIR_ISAS = ("avx512_bf16", "amx", "amx_emulated")
PAIR_FORMATS = tuple(name for name in FORMATS if name == "bf16" or name.startswith("fp8-"))


def multiplies_pairs(isa: str, *names: str) -> bool:
    return isa in PAIR_ISAS and any(name in PAIR_FORMATS for name in names)


def reference_isa(isa: str, *names: str) -> str:
    """The table whose bits, on one thread, a result of these formats on ``isa`` must have."""
    return isa if multiplies_pairs(isa, *names) else "scalar"


#: checkpoint blocks of formats that only hold such: channels, bytes, where the float16 scale is
HELD = {
    "IQ1_S": (256, 50, 0),
    "IQ1_M": (256, 56, None),
    "IQ2_XXS": (256, 66, 0),
    "IQ2_XS": (256, 74, 0),
    "IQ2_S": (256, 82, 0),
    "IQ3_XXS": (256, 98, 0),
    "IQ3_S": (256, 110, 0),
    "TQ1_0": (256, 54, 52),
    "NVFP4": (64, 36, None),
}


def held_weight(name: str, raw: np.ndarray, rows: int, cols: int) -> PackedWeight:
    """Blocks uint8 [rows, blocks, bytes], with scales of about one put in."""
    source, format_ = formats.get(name).exact_from[0], formats.get(name)
    scales = np.random.default_rng(rows).uniform(0.5, 1, raw.shape[:2]).astype(np.float16)
    at = HELD[source][2]
    if source == "IQ1_M":
        bits = scales.view(np.uint16)
        for part in range(4):
            raw[..., 49 + 2 * part] &= 15
            raw[..., 49 + 2 * part] |= ((bits >> (4 * part) & 15) << 4).astype(np.uint8)
    elif source == "NVFP4":
        raw[..., :4] = raw[..., :4] % 32 + 0x28  # 0.25 to 3.75
    else:
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
    packed = format_.pack_exact(source, torch.from_numpy(raw).reshape(-1), rows, cols)
    return PackedWeight(format_, rows, cols, packed)


def held_shape(name: str, rows: int, cols: int) -> tuple[int, int, int]:
    channels, nbytes, _ = HELD[formats.get(name).exact_from[0]]
    return rows, -(-cols // channels), nbytes


def random_weight(name: str, rows: int, cols: int, seed: int = 0) -> PackedWeight:
    """Normal weights in the format's own best rounding, or random codes."""
    if not formats.get(name).quantizes:
        rng = np.random.default_rng(seed)
        raw = rng.integers(0, 256, held_shape(name, rows, cols), dtype=np.uint8)
        return held_weight(name, raw, rows, cols)
    generator = torch.Generator().manual_seed(seed)
    weight = formats.get(name)
    return PackedWeight(
        weight, rows, cols, weight.pack(torch.randn(rows, cols, generator=generator))
    )


def extreme_weight(name: str, rows: int, cols: int) -> PackedWeight:
    """Every code at an end of its range: whole rows at the lowest, the highest, and alternating."""
    if not formats.get(name).quantizes:
        raw = np.empty(held_shape(name, rows, cols), dtype=np.uint8)
        raw[:] = np.resize([0x00, 0xFF, 0x55, 0xAA, 0x77], rows).astype(np.uint8)[:, None, None]
        return held_weight(name, raw, rows, cols)
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

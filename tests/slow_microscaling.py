"""Checkpoints in floats that share a power of two, written and decoded one element at a time.

Written from the specification of the formats (Open Compute Project, MX 1.0), not from the reader.
e2m1: a sign, two bits of exponent with bias 1, one bit of mantissa. e8m0: 2^(byte - 127), 255 is
NaN. Two e2m1 numbers to a byte, the first in the low bits.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

import slow_quantizers as slow

GROUP = 32


def e2m1(code: int) -> float:
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = (2 + mantissa) * 2.0 ** (exponent - 2) if exponent else mantissa * 0.5
    return -magnitude if code >> 3 else magnitude


@dataclass
class Microscaled:
    """value[n][k] = number(codes[n][k]) * 2^(exponents[n][k // 32] - 127), of 4 or 8 bits."""

    codes: list[list[int]]
    exponents: list[list[int]]
    bits: int

    def floats(self) -> Tensor:
        """float32 [N, K], nothing is rounded."""
        number = e2m1 if self.bits == 4 else slow.e4m3
        return torch.tensor(
            [
                [number(code) * 2.0 ** (line[k // GROUP] - 127) for k, code in enumerate(row)]
                for row, line in zip(self.codes, self.exponents, strict=True)
            ],
            dtype=torch.float64,
        ).float()

    @property
    def scales(self) -> Tensor:
        """uint8 [N, G]."""
        return torch.tensor(self.exponents, dtype=torch.uint8)

    @property
    def bytes_(self) -> Tensor:
        """uint8 [N, K / 2], or [N, K] of 8 bits."""
        codes = torch.tensor(self.codes, dtype=torch.uint8)
        return codes if self.bits == 8 else codes[:, 0::2] + 16 * codes[:, 1::2]


def any_microscaled(rows: int, cols: int, *, bits: int, seed: int = 0) -> Microscaled:
    """Every code among random ones but NaN, exponents small and large."""
    rng = random.Random(seed)
    codes = list(range(16)) if bits == 4 else [c for c in range(256) if c & 127 != 127]
    matrix = [[rng.choice(codes) for _ in range(cols)] for _ in range(rows)]
    matrix[0][: min(cols, len(codes))] = codes[:cols]
    exponents = [[rng.randint(100, 140) for _ in range(-(-cols // GROUP))] for _ in range(rows)]
    exponents[0][-1], exponents[-1][0] = (0, 252) if bits == 4 else (0, 240)
    return Microscaled(matrix, exponents, bits)


def quantize(weight: Tensor, *, bits: int) -> Microscaled:
    """To the nearest numbers, the exponent such that the largest does not overflow."""
    number, top = (e2m1, 6.0) if bits == 4 else (slow.e4m3, 448.0)
    table = {number(c): c for c in range(16 if bits == 4 else 255) if bits == 4 or c & 127 != 127}
    codes, exponents = [], []
    for row in weight.tolist():
        line, stored = [], []
        for at in range(0, len(row), GROUP):
            part = row[at : at + GROUP]
            power = math.ceil(math.log2(max(map(abs, part)) / top))
            stored.append(power + 127)
            line += [table[min(table, key=lambda v: abs(v - x / 2.0**power))] for x in part]
        codes.append(line)
        exponents.append(stored)
    return Microscaled(codes, exponents, bits)


@dataclass
class TwoLevels:
    """value[n][k] = (factor * scales[n][k // 16]) * e2m1(codes[n][k]), rounded to float32 twice."""

    codes: list[list[int]]
    scales: list[list[int]]
    factor: float

    @property
    def cols(self) -> int:
        return len(self.codes[0])

    @property
    def channel_groups(self) -> list[int]:
        return [k // 16 for k in range(self.cols)]

    def floats(self) -> Tensor:
        out = []
        for row, line in zip(self.codes, self.scales, strict=True):
            steps = [slow.single(self.factor * slow.e4m3(byte)) for byte in line]
            out.append([steps[k // 16] * e2m1(code) for k, code in enumerate(row)])
        return torch.tensor(out, dtype=torch.float64).float()

    def tensors(self, codes: str, factor: str, value: float) -> dict[str, Tensor]:
        bytes_ = torch.tensor(self.codes, dtype=torch.uint8)
        scales = torch.tensor(self.scales, dtype=torch.uint8)
        return {
            codes: bytes_[:, 0::2] + 16 * bytes_[:, 1::2],
            "weight_scale": scales.view(torch.float8_e4m3fn),
            factor: torch.tensor(value),
        }


def any_two_levels(rows: int, cols: int, *, seed: int = 0) -> TwoLevels:
    """Every code, scales from the smallest to the largest e4m3, zero among them."""
    rng = random.Random(seed)
    codes = [[rng.randrange(16) for _ in range(cols)] for _ in range(rows)]
    codes[0][: min(cols, 16)] = range(min(cols, 16))
    scales = [[rng.randrange(1, 127) for _ in range(-(-cols // 16))] for _ in range(rows)]
    scales[0][0], scales[-1][-1], scales[-1][0] = 0, 1, 126
    return TwoLevels(codes, scales, slow.single(rng.uniform(1e-5, 1e-3)))


def quantize_two_levels(weight: Tensor) -> TwoLevels:
    """To the nearest numbers, the largest of the matrix being 6 times the largest scale."""
    factor = slow.single(float(weight.abs().max()) / (6 * 448))
    codes, scales = [], []
    for row in weight.tolist():
        line, stored = [], []
        for at in range(0, len(row), 16):
            part = row[at : at + 16]
            top = max(map(abs, part)) / (6 * factor)
            stored.append(min(range(127), key=lambda byte: abs(slow.e4m3(byte) - top)))
            step = factor * slow.e4m3(stored[-1]) or 1.0
            line += [min(range(16), key=lambda code: abs(e2m1(code) - x / step)) for x in part]
        codes.append(line)
        scales.append(stored)
    return TwoLevels(codes, scales, factor)


MODELOPT_NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
    "ignore": ["lm_head"],
}


def compressed_config(*, bits: int):
    kind = "mxfp4-pack-quantized" if bits == 4 else "mxfp8-quantized"
    config = slow.compressed_config(bits=bits, group=GROUP, symmetric=True, format=kind)
    config["config_groups"]["group_0"]["weights"] |= {
        "type": "float",
        "scale_dtype": "torch.uint8",
    }
    return config


def compressed(q: Microscaled) -> dict[str, Tensor]:
    if q.bits == 4:
        return {"weight_packed": q.bytes_, "weight_scale": q.scales}
    return {"weight": q.bytes_.view(torch.float8_e4m3fn), "weight_scale": q.scales}


def blocks(experts: list[Microscaled]) -> tuple[Tensor, Tensor]:
    """Stacked: uint8 [E, N, K / 32, 16] and [E, N, K / 32]."""
    scales = torch.stack([q.scales for q in experts])
    return torch.stack([q.bytes_ for q in experts]).view(*scales.shape, GROUP // 2), scales

"""Quantized checkpoints written and decoded one element at a time in plain Python.

Written from the descriptions of the formats, not from the reader: it shares nothing with it.

GPTQ (AutoGPTQ): a word of ``qweight`` holds 32 / bits consecutive input channels of one output
channel, one of ``qzeros`` consecutive output channels of one group, lowest bits first; version 1
stores the zero point minus one. AWQ (AutoAWQ, gemm): a word holds eight output channels, the one at
bit 4 i being number 0, 2, 4, 6, 1, 3, 5, 7 of them for i = 0 ... 7. compressed-tensors
(pack-quantized): a word holds consecutive input channels; codes and zero points are signed, plus
2^(bits-1) when packed; packed zero points go along the output channels. 8-bit floats: e4m3 bytes
with a scale per block, channel or tensor.
"""

from __future__ import annotations

import bisect
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

AWQ_CHANNELS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Quantized:
    """value[n][k] = scales[n][g] * (codes[n][k] - zeros[n][g]), g = k // group, or g_idx[k] where
    channels are out of order; codes unsigned.
    """

    codes: list[list[int]]
    scales: list[list[float]]
    zeros: list[list[int]]
    bits: int
    group: int
    g_idx: list[int] | None = None

    @property
    def rows(self) -> int:
        return len(self.codes)

    @property
    def cols(self) -> int:
        return len(self.codes[0])

    @property
    def groups(self) -> int:
        return len(self.scales[0])

    @property
    def channel_groups(self) -> list[int]:
        return self.g_idx or [k // self.group for k in range(self.cols)]

    def floats(self) -> Tensor:
        """float32 [N, K]; the products are exact, so nothing is rounded."""
        out = []
        for n, row in enumerate(self.codes):
            values = []
            for k, code in enumerate(row):
                g = self.channel_groups[k]
                values.append(self.scales[n][g] * (code - self.zeros[n][g]))
            out.append(values)
        return torch.tensor(out, dtype=torch.float32)


def half(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float16))


def single(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


def any_codes(
    rows: int, cols: int, *, bits: int, group: int, symmetric: bool, seed: int = 0
) -> Quantized:
    """Random codes, the extremes among them; zero points 0 and the largest among others."""
    rng = random.Random(seed)
    size = group if group > 0 else cols
    count, top = -(-cols // size), (1 << bits) - 1
    codes = [[rng.randint(0, top) for _ in range(cols)] for _ in range(rows)]
    codes[0][0], codes[0][-1], codes[-1][0], codes[-1][-1] = 0, top, top, 0
    middle = 1 << (bits - 1)
    zeros = [[middle if symmetric else rng.randint(0, top) for _ in range(count)] for _ in codes]
    if not symmetric:
        zeros[0][0], zeros[-1][-1] = 0, top
    # With 8 significant bits, so that float16 and bfloat16 both hold them.
    scales = [[rng.choice((-1, 1, 1)) * rng.randint(128, 255) * 2.0 ** rng.randint(-16, -9)
               for _ in range(count)] for _ in codes]  # fmt: skip
    return Quantized(codes, scales, zeros, bits, size)


def quantize(weight: Tensor, *, bits: int, group: int, symmetric: bool) -> Quantized:
    """Round a float matrix to the nearest codes, group by group."""
    cols = weight.shape[1]
    size = group if group > 0 else cols
    top, middle = (1 << bits) - 1, 1 << (bits - 1)
    codes, scales, zeros = [], [], []
    for row in weight.tolist():
        row_codes: list[int] = []
        row_scales: list[float] = []
        row_zeros: list[int] = []
        for at in range(0, cols, size):
            part = row[at : at + size]
            if symmetric:
                scale, zero = half(max(abs(x) for x in part) / middle), middle
            else:
                low, high = min(0.0, *part), max(0.0, *part)
                scale = half((high - low) / top)
                zero = min(top, max(0, round(-low / scale)))
            row_codes += [min(top, max(0, round(x / scale) + zero)) for x in part]
            row_scales.append(scale)
            row_zeros.append(zero)
        codes.append(row_codes)
        scales.append(row_scales)
        zeros.append(row_zeros)
    return Quantized(codes, scales, zeros, bits, size)


def shuffle_channels(q: Quantized, seed: object) -> Quantized:
    """The same numbers with the input channels in a random order, each still in its group."""
    order = list(range(q.cols))
    random.Random(str(seed)).shuffle(order)
    codes = [[row[k] for k in order] for row in q.codes]
    return replace(q, codes=codes, g_idx=[k // q.group for k in order])


def quantize_shuffled(weight: Tensor, seed: object, *, bits: int, group: int, symmetric: bool):
    """As ``quantize``, groups being made of random input channels."""
    order = list(range(weight.shape[1]))
    random.Random(str(seed)).shuffle(order)
    q = quantize(weight[:, order], bits=bits, group=group, symmetric=symmetric)
    places = {k: j for j, k in enumerate(order)}
    codes = [[row[places[k]] for k in range(q.cols)] for row in q.codes]
    return replace(q, codes=codes, g_idx=[places[k] // q.group for k in range(q.cols)])


def word(values: list[int], bits: int) -> int:
    """Values, the first in the lowest bits, as a signed 32-bit number."""
    total = sum((value % (1 << bits)) << (bits * i) for i, value in enumerate(values))
    return total - (1 << 32) if total >= 1 << 31 else total


def words(rows: list[list[int]], bits: int) -> Tensor:
    """int32 [rows, words]: each row packed, the last word filled up with zeros."""
    per = 32 // bits
    return torch.tensor(
        [[word(row[at : at + per], bits) for at in range(0, len(row), per)] for row in rows],
        dtype=torch.int32,
    )


def transpose(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def gptq(
    q: Quantized, *, version: int = 1, scale_type: torch.dtype = torch.float16
) -> dict[str, Tensor]:
    stored = [[zero - 1 if version == 1 else zero for zero in row] for row in q.zeros]
    return {
        "qweight": words(q.codes, q.bits).T.contiguous(),
        "qzeros": words(transpose(stored), q.bits),
        "scales": torch.tensor(q.scales).T.contiguous().to(scale_type),
        "g_idx": torch.tensor(q.channel_groups, dtype=torch.int32),
    }


def awq(q: Quantized, *, scale_type: torch.dtype = torch.float16) -> dict[str, Tensor]:
    def shuffled(rows: list[list[int]]) -> Tensor:
        """[x][N] -> [x, N / 8] words."""
        return words(
            [[row[at + c] for at in range(0, len(row), 8) for c in AWQ_CHANNELS] for row in rows], 4
        )

    return {
        "qweight": shuffled(transpose(q.codes)),
        "qzeros": shuffled(transpose(q.zeros)),
        "scales": torch.tensor(q.scales).T.contiguous().to(scale_type),
    }


def awq_gemv(q: Quantized) -> dict[str, Tensor]:
    """AWQ (AutoAWQ, gemv): words along the row, in order; rows of zero points and scales filled up
    to whole words, of which groups of 64 want an even number and groups of 32 four at a time."""
    width, step = -(-q.groups // 8), {32: 4, 64: 2}.get(q.group, 1)
    while width % step:
        width += 1
    padding = 8 * width - q.groups
    return {
        "qweight": words(q.codes, 4),
        "qzeros": words([row + [0] * padding for row in q.zeros], 4),
        "scales": torch.tensor([row + [0.0] * padding for row in q.scales]).half(),
    }


def compressed(
    q: Quantized,
    *,
    symmetric: bool,
    packed_zeros: bool = True,
    scale_type: torch.dtype = torch.bfloat16,
) -> dict[str, Tensor]:
    middle = 1 << (q.bits - 1)
    tensors = {
        # Unsigned codes are the signed ones plus the middle.
        "weight_packed": words(q.codes, q.bits),
        "weight_scale": torch.tensor(q.scales).to(scale_type),
        "weight_shape": torch.tensor([q.rows, q.cols]),
    }
    if not symmetric and packed_zeros:
        tensors["weight_zero_point"] = words(transpose(q.zeros), q.bits).T.contiguous()
    elif not symmetric:
        signed = [[zero - middle for zero in row] for row in q.zeros]
        tensors["weight_zero_point"] = torch.tensor(signed, dtype=torch.int8)
    return tensors


def signed_bytes(q: Quantized, *, scale_type: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """compressed-tensors int-quantized."""
    return {
        "weight": torch.tensor([[c - 128 for c in row] for row in q.codes], dtype=torch.int8),
        "weight_scale": torch.tensor(q.scales).to(scale_type),
    }


def e4m3(code: int) -> float:
    """Sign, 4 bits of exponent with bias 7, 3 bits of mantissa; no infinities."""
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -magnitude if code >> 7 else magnitude


E4M3 = {e4m3(code): code for code in range(127)}


@dataclass
class Floats8:
    """value[n][k] = scales[n // block[0]][k // block[1]] * e4m3(codes[n][k])."""

    codes: list[list[int]]
    scales: list[list[float]]
    block: tuple[int, int]

    def floats(self) -> Tensor:
        """float32 [N, K], each rounded once."""
        rows, cols = self.block
        return torch.tensor(
            [
                [self.scales[n // rows][k // cols] * e4m3(code) for k, code in enumerate(row)]
                for n, row in enumerate(self.codes)
            ],
            dtype=torch.float64,
        ).float()

    def tensors(self, scale_name: str, scale_type: torch.dtype) -> dict[str, Tensor]:
        codes = torch.tensor(self.codes, dtype=torch.uint8).view(torch.float8_e4m3fn)
        return {"weight": codes, scale_name: torch.tensor(self.scales).to(scale_type)}


def any_floats8(rows: int, cols: int, *, block: tuple[int, int], seed: int = 0) -> Floats8:
    """Random bytes but NaN, subnormals and both zeros among them, float32 scales."""
    rng = random.Random(seed)
    finite = [code for code in range(256) if code & 127 != 127]
    codes = [[rng.choice(finite) for _ in range(cols)] for _ in range(rows)]
    codes[0][:8] = [0, 1, 7, 8, 126, 128, 135, 254]
    scales = [[single(rng.uniform(1e-6, 3e-3)) for _ in range(-(-cols // block[1]))]
              for _ in range(-(-rows // block[0]))]  # fmt: skip
    return Floats8(codes, scales, block)


def quantize_floats8(weight: Tensor, *, block: tuple[int, int]) -> Floats8:
    """Round a float matrix to the nearest e4m3 numbers, block by block."""
    values, (rows, cols) = weight.tolist(), block
    magnitudes = sorted(E4M3)
    scales = []
    for n in range(0, len(values), rows):
        line = []
        for k in range(0, len(values[0]), cols):
            part = [x for row in values[n : n + rows] for x in row[k : k + cols]]
            line.append(single(max(map(abs, part)) / 448))
        scales.append(line)

    def code(x: float, scale: float) -> int:
        target = abs(x) / scale
        at = bisect.bisect(magnitudes, target)
        near = min(magnitudes[max(at - 1, 0) : at + 1], key=lambda m: abs(m - target))
        return E4M3[near] + (128 if x < 0 else 0)

    codes = [[code(x, scales[n // rows][k // cols]) for k, x in enumerate(row)]
             for n, row in enumerate(values)]  # fmt: skip
    return Floats8(codes, scales, block)


def gptq_config(*, bits: int, group: int, symmetric: bool, version: int = 1):
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": False,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }


def awq_config(*, group: int):
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": ["gate"],
    }


def weights_config(*, bits: int, group: int, symmetric: bool):
    strategy = {"strategy": "group", "group_size": group}
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "dynamic": False,
        "actorder": None,
        **(strategy if group > 0 else {"strategy": "channel", "group_size": None}),
    }


def compressed_config(*, bits: int, group: int, symmetric: bool, format: str = "pack-quantized"):
    weights = weights_config(bits=bits, group=group, symmetric=symmetric)
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*gate$"],
        "kv_cache_scheme": None,
    }

"""One layer's experts, encoded once, in the bytes that each side reads.

Random weights stand for real ones: speed does not depend on their values. Few distinct experts are
repeated at different addresses, so that preparing them is quick while memory traffic is real.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from bench_moe import Shape
from moestro import formats
from peers.llama_cpp import LlamaCpp

PARTS = ("gate", "up", "down")
DISTINCT = 8
_SCALE = 0.02

Array = npt.NDArray[Any]


@dataclass(kw_only=True)
class Encoded:
    """One matrix kind of all distinct experts.

    packed: our bytes of each. values: float32 [D, N, K] that the codes stand for, or None where
    the peer makes codes of its own. ggml, kt, kt_scales: what these read, or None.
    """

    packed: list[Tensor]
    values: Tensor | None
    ggml: Array | None = None
    kt: Array | None = None
    kt_scales: Array | None = None


#: float32 [D, N, K] -> the same in all encodings
Encoder = Callable[[Tensor, LlamaCpp], Encoded]


def _pack(name: str, weights: Tensor) -> list[Tensor]:
    return [formats.get(name).pack(matrix) for matrix in weights]


def _ggml(type_name: str) -> Encoder:
    """Quantized by ggml; kt-kernel reads the same blocks."""

    def encode(weights: Tensor, ggml: LlamaCpp) -> Encoded:
        blocks = ggml.quantize_rows(weights.numpy(), type_name)
        values = quants.dequantize(blocks, GGMLQuantizationType[type_name])
        packed = [_exact(type_name, matrix, weights.shape[1:]) for matrix in blocks]
        return Encoded(packed=packed, values=torch.from_numpy(values), ggml=blocks, kt=blocks)

    return encode


def _exact(type_name: str, blocks: Array, shape: torch.Size) -> Tensor:
    raw = torch.from_numpy(np.ascontiguousarray(blocks).reshape(-1))
    return formats.exact_for(type_name).pack_exact(type_name, raw, *shape)


def _bf16(weights: Tensor, ggml: LlamaCpp) -> Encoded:
    bits = weights.bfloat16().view(torch.int16).numpy().view(np.uint8)
    return Encoded(packed=_pack("bf16", weights), values=weights, ggml=bits, kt=bits)


def _int4(weights: Tensor, ggml: LlamaCpp) -> Encoded:
    """Symmetric codes with a bfloat16 scale per 32 channels, which float16 holds exactly."""
    d, n, k = weights.shape
    groups = weights.view(d, n, k // 32, 32)
    scales = (groups.abs().amax(3) / 7).bfloat16()
    codes = (groups / scales.float()[..., None]).round_().clamp_(-8, 7)
    values = (codes * scales.float()[..., None]).view(d, n, k)
    stored = (codes.view(d, n, k) + 8).to(torch.uint8)
    packed = [formats.get("int4-g32").pack_codes(stored[e], scales[e].float()) for e in range(d)]
    return Encoded(
        packed=packed,
        values=values,
        kt=(stored[:, :, 0::2] | (stored[:, :, 1::2] << 4)).numpy(),
        kt_scales=scales.view(torch.int16).numpy(),
    )


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _mxfp4(weights: Tensor, ggml: LlamaCpp) -> Encoded:
    """4-bit floats with a power of two per 32 channels, chosen so that nothing is clipped."""
    d, n, k = weights.shape
    groups = weights.view(d, n, k // 32, 32)
    exponents = torch.ceil(torch.log2(groups.abs().amax(3) / 6))
    scaled = groups / torch.exp2(exponents)[..., None]
    codes = torch.bucketize(scaled.abs(), (_E2M1[1:] + _E2M1[:-1]) / 2)
    signs = torch.where(scaled < 0, -1.0, 1.0)
    values = (_E2M1[codes] * signs * torch.exp2(exponents)[..., None]).view(d, n, k)
    nibbles = (codes + 8 * (scaled < 0)).to(torch.uint8)
    blocks = torch.cat(
        [
            (exponents + 127).to(torch.uint8)[..., None],
            nibbles[..., :16] | (nibbles[..., 16:] << 4),
        ],
        dim=3,
    ).view(d, n, -1)
    flat = nibbles.view(d, n, k)
    return Encoded(
        packed=[_exact("MXFP4", matrix.numpy(), weights.shape[1:]) for matrix in blocks],
        values=values,
        ggml=blocks.numpy(),
        kt=(flat[:, :, 0::2] | (flat[:, :, 1::2] << 4)).numpy(),
        kt_scales=torch.exp2(exponents).bfloat16().view(torch.int16).numpy(),
    )


def _fp8(weights: Tensor, ggml: LlamaCpp) -> Encoded:
    """e4m3 with a float32 scale per 128 x 128 block."""
    d, n, k = weights.shape
    blocks = weights.view(d, n // 128, 128, k // 128, 128)
    scales = blocks.abs().amax((2, 4)) / 448
    spread = scales.repeat_interleave(128, 1)
    codes = (weights.view(d, n, -1, 128) / spread[..., None]).to(torch.float8_e4m3fn)
    values = (codes.float() * spread[..., None]).view(d, n, k)
    stored = codes.view(d, n, k).view(torch.uint8)
    packed = [formats.get("fp8-g128").pack_codes(stored[e], spread[e]) for e in range(d)]
    return Encoded(packed=packed, values=values, kt=stored.numpy(), kt_scales=scales.numpy())


def _int8_rows(weights: Tensor, ggml: LlamaCpp) -> Encoded:
    """kt-kernel quantizes bfloat16 weights itself, to 8 bits with a scale per row."""
    bits = weights.bfloat16().view(torch.int16).numpy()
    return Encoded(packed=_pack("int8-row", weights), values=None, kt=bits)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A weight format: ours, and ggml's type name and kt-kernel's method where there is one."""

    format: str
    encode: Encoder
    ggml_type: str | None = None
    kt_method: str | None = None


KINDS = {
    "Q4_K": Kind(format="k4", encode=_ggml("Q4_K"), ggml_type="Q4_K", kt_method="LLAMAFILE"),
    "Q4_0": Kind(format="int4-g32", encode=_ggml("Q4_0"), ggml_type="Q4_0"),
    "Q8_0": Kind(format="int8-g32", encode=_ggml("Q8_0"), ggml_type="Q8_0"),
    "BF16": Kind(format="bf16", encode=_bf16, ggml_type="BF16", kt_method="BF16"),
    "MXFP4": Kind(format="mxfp4", encode=_mxfp4, ggml_type="MXFP4", kt_method="MXFP4"),
    "RAWINT4": Kind(format="int4-g32", encode=_int4, kt_method="RAWINT4"),
    "FP8": Kind(format="fp8-g128", encode=_fp8, kt_method="FP8"),
    "AMXINT8": Kind(format="int8-row", encode=_int8_rows, kt_method="AMXINT8"),
}


@dataclass(kw_only=True)
class Case:
    """A layer's experts: ``folder`` holds what peers read, ``parts`` what we read.

    source: float32 weights [D, N, K] of gate, up and down before quantization.
    """

    name: str
    kind: Kind
    shape: Shape
    folder: Path
    parts: dict[str, Encoded] = field(repr=False)
    source: dict[str, Tensor] = field(repr=False)


def make_case(name: str, shape: Shape, folder: Path, ggml: LlamaCpp) -> Case:
    """Draw weights, the same ones in every case, encode them, and write the peers' files."""
    kind = KINDS[name]
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    parts: dict[str, Encoded] = {}
    source: dict[str, Tensor] = {}
    for part in PARTS:
        rows, cols = shape.intermediate_size, shape.hidden_size
        size = (DISTINCT, *((cols, rows) if part == "down" else (rows, cols)))
        weights = (torch.randn(size, generator=generator) * _SCALE).bfloat16().float()
        source[part], parts[part] = weights, kind.encode(weights, ggml)
        for suffix in ("ggml", "kt", "kt_scales"):
            data = getattr(parts[part], suffix)
            if data is not None:
                np.ascontiguousarray(data).tofile(folder / f"{part}.{suffix}")
    facts = {
        "hidden": shape.hidden_size,
        "intermediate": shape.intermediate_size,
        "experts": shape.num_experts,
        "top_k": shape.top_k,
        "distinct": DISTINCT,
        "ggml_type": kind.ggml_type,
        "kt_method": kind.kt_method,
    }
    (folder / "case.json").write_text(json.dumps(facts))
    return Case(name=name, kind=kind, shape=shape, folder=folder, parts=parts, source=source)

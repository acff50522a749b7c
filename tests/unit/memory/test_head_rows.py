"""Matrices that a checkpoint holds as some rows of every head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from quantized_files import write
from tiny_checkpoints import MemoryCheckpoint, matrix
from torch import Tensor

import slow_quantizers as slow
from moestro.checkpoints import open_checkpoint
from moestro.core.errors import CheckpointError, UnsupportedFormat
from moestro.formats.base import PackedWeight
from moestro.memory.loader import load_weights
from moestro.memory.policy import FormatPolicy
from moestro.memory.weights import HeadRows, WeightSpec

HEADS, KEYS, VALUES, RANK = 3, 10, 16, 64
ROWS = KEYS + VALUES
KEY_ROWS = HeadRows(
    sources=("fused.weight",), heads=HEADS, rows=ROWS, first=0, count=KEYS, transposed=True
)
VALUE_ROWS = HeadRows(sources=("fused.weight",), heads=HEADS, rows=ROWS, first=KEYS, count=VALUES)
KEY = matrix("key", HEADS * RANK, KEYS, sources=("k_b",), head_rows=KEY_ROWS)
VALUE = matrix("value", HEADS * VALUES, RANK, sources=("v_b",), head_rows=VALUE_ROWS)


def expected(fused: Tensor) -> tuple[Tensor, Tensor]:
    """The two matrices of a fused tensor, row by row."""
    keys, values = [], []
    for head in range(HEADS):
        rows = fused[head * ROWS : (head + 1) * ROWS]
        keys += [rows[:KEYS, r] for r in range(RANK)]
        values += list(rows[KEYS:])
    return torch.stack(keys), torch.stack(values)


def load(checkpoint, *specs: WeightSpec, formats: str = "") -> list[PackedWeight]:
    loaded = load_weights(checkpoint, specs, policy=FormatPolicy.parse(formats))
    return [loaded[spec.key] for spec in specs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_keep_their_type(dtype: torch.dtype):
    fused = torch.randn(HEADS * ROWS, RANK).to(dtype)
    key, value = load(MemoryCheckpoint({"fused.weight": fused}), KEY, VALUE)
    want = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    assert (key.format_name, value.format_name) == (want, want)
    for got, right in zip((key, value), expected(fused.float()), strict=True):
        assert torch.equal(got.unpack(), right)


def test_a_named_format_is_packed_from_the_values():
    fused = torch.randn(HEADS * ROWS, RANK)
    key, value = load(MemoryCheckpoint({"fused.weight": fused}), KEY, VALUE, formats="int8-g32")
    assert (key.format_name, value.format_name) == ("int8-g32", "int8-g32")
    for got, right in zip((key, value), expected(fused), strict=True):
        assert 0 < (got.unpack() - right).norm() / right.norm() < 0.01


def test_quantized_rows_keep_their_values():
    kind = gguf.GGMLQuantizationType.Q8_0
    raw = gguf.quants.quantize(torch.randn(HEADS * ROWS, RANK).numpy(), kind)
    fused = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    entry = ("Q8_0", tuple(fused.shape), torch.from_numpy(raw).reshape(-1))
    key, value = load(MemoryCheckpoint({"fused.weight": entry}, "gguf"), KEY, VALUE)
    for got, right in zip((key, value), expected(fused), strict=True):
        assert got.format_name == "f32"
        assert torch.equal(got.unpack(), right)


def test_quantized_matrices_of_their_own_keep_their_format():
    """Stacked by head, as GGUF files hold them."""
    kind = gguf.GGMLQuantizationType.Q8_0
    raw = gguf.quants.quantize(torch.randn(HEADS, VALUES, RANK).numpy(), kind)
    stacked = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    entry = ("Q8_0", tuple(stacked.shape), torch.from_numpy(raw).reshape(-1))
    (value,) = load(MemoryCheckpoint({"v_b": entry, "fused.weight": entry}, "gguf"), VALUE)
    assert value.format_name == "int8-g32"
    assert torch.equal(value.unpack(), stacked.flatten(0, 1))


@pytest.mark.parametrize("shape", [(HEADS, RANK, KEYS), (HEADS * RANK, KEYS)])
def test_matrices_of_their_own_may_be_stacked_or_flat(shape: tuple[int, ...]):
    weight = torch.randn(shape)
    (key,) = load(MemoryCheckpoint({"k_b": weight}), KEY)
    assert torch.equal(key.unpack(), weight.reshape(-1, KEYS))


def test_block_scaled_floats_keep_their_values(tmp_path: Path):
    """One scale per 128 x 128, here across heads and across keys and values."""
    heads, q = 12, slow.any_floats8(12 * ROWS, 200, block=(128, 128))
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write(tmp_path, q.tensors("weight_scale_inv", torch.float32), fp8, module="fused")
    key_rows = replace(KEY_ROWS, heads=heads)
    specs = (
        replace(KEY, shape=(heads * 200, KEYS), head_rows=key_rows),
        replace(VALUE, shape=(heads * VALUES, 200), head_rows=replace(VALUE_ROWS, heads=heads)),
    )
    with open_checkpoint(tmp_path) as checkpoint:
        key, value = load(checkpoint, *specs)
    formed = q.floats().view(heads, ROWS, 200)
    assert torch.equal(key.unpack(), formed[:, :KEYS].mT.reshape(-1, KEYS))
    assert torch.equal(value.unpack(), formed[:, KEYS:].reshape(-1, 200))


def test_what_is_wrong_is_named():
    with pytest.raises(CheckpointError, match=r"k_b \(or fused\.weight\)"):
        load(MemoryCheckpoint({"x": torch.zeros(1)}), KEY)
    with pytest.raises(CheckpointError, match=r"fused\.weight should be \[78, 64\] but is \[78, 6"):
        load(MemoryCheckpoint({"fused.weight": torch.zeros(HEADS * ROWS, 63)}), KEY)
    with pytest.raises(CheckpointError, match=r"k_b should be \[192, 10\] but is \[2, 96, 10\]"):
        load(MemoryCheckpoint({"k_b": torch.zeros(2, 96, KEYS)}), KEY)
    entry = ("Q1_X", (HEADS * ROWS, RANK), torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(UnsupportedFormat, match=r"fused\.weight: .*Q1_X"):
        load(MemoryCheckpoint({"fused.weight": entry}), KEY)
    with pytest.raises(CheckpointError, match="not finite"):
        load(MemoryCheckpoint({"fused.weight": torch.full((HEADS * ROWS, RANK), torch.nan)}), KEY)

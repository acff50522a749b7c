"""Quantized weights whose groups are not runs of input channels (activation order)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantized_files import GROUPS, check, load, write
from safetensors.torch import save_file
from tiny_checkpoints import matrix

import slow_quantizers as slow
from moestro.checkpoints import open_checkpoint
from moestro.checkpoints.quant_codes import read_codes
from moestro.checkpoints.quantized import QuantizedInfo
from moestro.core.errors import CheckpointError
from moestro.formats.base import PackedWeight
from moestro.memory.loader import load_weights
from moestro.memory.policy import FormatPolicy
from moestro.memory.stored_rows import CodedRows
from moestro.memory.weights import HeadRows


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True)])
@pytest.mark.parametrize(("cols", "group"), [(96, 32), (320, 64), (256, 256)])
def test_gptq_in_activation_order(
    tmp_path: Path, bits: int, symmetric: bool, cols: int, group: int, declared: bool
):
    q = slow.any_codes(24, cols, bits=bits, group=group, symmetric=symmetric)
    shuffled = slow.shuffle_channels(q, cols)
    config = slow.gptq_config(bits=bits, group=group, symmetric=symmetric) | {"desc_act": declared}
    write(tmp_path, slow.gptq(shuffled), config)
    name = f"int{bits}{'' if symmetric else 'z'}-{GROUPS.get(group, 'g128')}"
    check(tmp_path, shuffled, name)
    assert (load(tmp_path, 24, cols).input_order is None) == (group == cols)
    # Whatever else it is packed in has the channels in their own order.
    plain = load(tmp_path, 24, cols, "f32")
    assert plain.input_order is None
    assert torch.equal(plain.unpack(), shuffled.floats())


def test_scales_fitted_anew_in_activation_order(tmp_path: Path):
    q = slow.shuffle_channels(slow.any_codes(16, 64, bits=4, group=32, symmetric=True), 0)
    q.scales[3][1] = 0.1
    write(
        tmp_path,
        slow.gptq(q, scale_type=torch.float32),
        slow.gptq_config(bits=4, group=32, symmetric=True),
    )
    weight = load(tmp_path, 16, 64, "int4-g32")
    assert weight.input_order is not None
    assert (weight.unpack() - q.floats()).abs().max() <= 8 * 0.1 * 2**-11
    with open_checkpoint(tmp_path) as checkpoint:
        info = checkpoint.info("a.q_proj.weight")
        assert isinstance(info, QuantizedInfo)
        rows = CodedRows(info.dtype, read_codes(checkpoint, info), named=True, ordered=True)
    importance = rows.arranged(torch.arange(64.0))
    assert importance is not None and torch.equal(importance.int(), weight.input_order)


def test_gptq_channel_order(tmp_path: Path):
    q = slow.any_codes(16, 64, bits=4, group=32, symmetric=True)
    tensors = slow.gptq(q)
    for declared in (True, False):
        config = slow.gptq_config(bits=4, group=32, symmetric=True) | {"desc_act": declared}
        write(tmp_path, slow.gptq(q), config)
        check(tmp_path, q, "int4-g32")  # ascending, whatever is declared
        write(tmp_path, tensors | {"g_idx": tensors["g_idx"] + 1}, config)
        with pytest.raises(CheckpointError, match=r"groups 1 to 2, but there are 2"):
            load(tmp_path, 16, 64)
        uneven = tensors["g_idx"].clone()
        uneven[40] = 0
        write(tmp_path, tensors | {"g_idx": uneven}, config)
        with pytest.raises(CheckpointError, match=r"does not assign 32 input channels to each"):
            load(tmp_path, 16, 64)
    tensors.pop("g_idx")
    write(tmp_path, tensors, slow.gptq_config(bits=4, group=32, symmetric=True))
    check(tmp_path, q, "int4-g32")
    write(
        tmp_path, tensors, slow.gptq_config(bits=4, group=32, symmetric=True) | {"desc_act": True}
    )
    with pytest.raises(CheckpointError, match=r"a\.q_proj\.g_idx is missing"):
        open_checkpoint(tmp_path)


def test_compressed_channel_order(tmp_path: Path):
    q = slow.any_codes(16, 64, bits=4, group=32, symmetric=True)
    shuffled = slow.shuffle_channels(q, 1)
    config = slow.compressed_config(bits=4, group=32, symmetric=True)
    weights = config["config_groups"]["group_0"]["weights"]
    tensors = slow.compressed(q, symmetric=True)
    ascending = torch.arange(64, dtype=torch.int32) // 32
    for actorder in (None, "static", "weight", "group"):
        weights["actorder"] = actorder
        for order in (ascending, torch.full_like(ascending, -1)):
            write(tmp_path, tensors | {"weight_g_idx": order}, config)
            check(tmp_path, q, "int4-g32")
        order = torch.tensor(shuffled.g_idx, dtype=torch.int32)
        packed = slow.compressed(shuffled, symmetric=True)
        write(tmp_path, packed | {"weight_g_idx": order}, config)
        check(tmp_path, shuffled, "int4-g32")
    weights["actorder"] = "group"
    write(tmp_path, tensors, config)
    with pytest.raises(CheckpointError, match="weight_g_idx is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("transposed", [True, False])
def test_rows_that_are_taken_apart_have_their_columns_as_the_input_has(
    tmp_path: Path, transposed: bool
):
    heads, cols = 3, 64
    q = slow.any_codes(heads * 40, cols, bits=4, group=32, symmetric=True)
    q = slow.shuffle_channels(q, 7)
    quantized = write(
        tmp_path / "gptq", slow.gptq(q), slow.gptq_config(bits=4, group=32, symmetric=True)
    )
    floats = write(tmp_path / "floats", {}, None)
    save_file({"a.q_proj.weight": q.floats()}, floats / "model.safetensors")
    sources = ("a.q_proj.weight",)
    picked = HeadRows(
        sources=sources, heads=heads, rows=40, first=8, count=32, transposed=transposed
    )
    shape = (heads * cols, 32) if transposed else (heads * 32, cols)
    spec = matrix("k", *shape, sources=("elsewhere",), head_rows=picked)
    for formats in ("int4-g32", ""):
        found = []
        for folder in (quantized, floats):
            with open_checkpoint(folder) as checkpoint:
                policy = FormatPolicy.parse(formats)
                found.append(load_weights(checkpoint, [spec], policy=policy)["k"])
        weight, expected = found
        assert isinstance(weight, PackedWeight) and isinstance(expected, PackedWeight)
        assert weight.input_order is None
        assert torch.equal(weight.data, expected.data)

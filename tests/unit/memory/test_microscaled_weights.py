"""Single weights in floats that share a power of two, against a decoder that works bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantized_files import load, write

import slow_microscaling as mx
import slow_quantizers as slow
from moestro.checkpoints import open_checkpoint
from moestro.core.errors import CheckpointError, UnsupportedFormat

SHAPES = [(40, 96), (16, 160), (8, 32)]
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def check(folder: Path, q: mx.Microscaled, format_name: str, formats: str = "") -> None:
    weight = load(folder, len(q.codes), len(q.codes[0]), formats)
    assert weight.format_name == format_name
    assert torch.equal(weight.unpack(), q.floats())


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize(("bits", "name"), [(4, "mxfp4"), (8, "fp8-g32")])
def test_compressed(tmp_path: Path, rows: int, cols: int, bits: int, name: str):
    q = mx.any_microscaled(rows, cols, bits=bits)
    write(tmp_path, mx.compressed(q), mx.compressed_config(bits=bits))
    check(tmp_path, q, name)
    check(tmp_path, q, "f32", "f32")


def test_a_width_that_is_no_multiple_of_the_group(tmp_path: Path):
    q = mx.any_microscaled(20, 70, bits=8)
    write(tmp_path, mx.compressed(q), mx.compressed_config(bits=8))
    check(tmp_path, q, "fp8-g32")


@pytest.mark.parametrize("scale_name", ["scale", "weight_scale_inv"])
@pytest.mark.parametrize("declared_inside", [True, False])
def test_experts_in_4_bits_beside_8_bit_floats(
    tmp_path: Path, scale_name: str, declared_inside: bool
):
    """As DeepSeek-V4 stores experts: packed in signed bytes, e8m0 scales."""
    q = mx.any_microscaled(40, 96, bits=4)
    tensors = {
        "weight": q.bytes_.view(torch.int8),
        scale_name: q.scales.view(torch.float8_e8m0fnu),
    }
    declared = {**FP8, "scale_fmt": "ue8m0"}
    expert = {"expert_dtype": "fp4"}
    write(tmp_path, tensors, declared | (expert if declared_inside else {}))
    if not declared_inside:
        config = tmp_path / "config.json"
        config.write_text(config.read_text().replace("{", '{"expert_dtype": "fp4", ', 1))
    check(tmp_path, q, "mxfp4")


@pytest.mark.parametrize("scale_name", ["scale", "weight_scale_inv"])
@pytest.mark.parametrize("scale_type", [torch.float8_e8m0fnu, torch.uint8, torch.float32])
def test_blocks_of_8_bit_floats_with_exponents(
    tmp_path: Path, scale_name: str, scale_type: torch.dtype
):
    q = slow.any_floats8(200, 300, block=(128, 128))
    exponents = torch.tensor([[120, 131, 0], [127, 99, 115]], dtype=torch.uint8)
    q.scales = [[2.0 ** (e - 127) for e in line] for line in exponents.tolist()]
    tensors = q.tensors(scale_name, torch.float32)
    if scale_type != torch.float32:
        tensors[scale_name] = exponents.view(scale_type)
    write(tmp_path, tensors, FP8 | {"scale_fmt": "ue8m0", "expert_dtype": "fp4"})
    weight = load(tmp_path, 200, 300)
    assert weight.format_name == "fp8-g128"
    assert torch.equal(weight.unpack(), q.floats())


def test_bytes_are_exponents_only_if_declared(tmp_path: Path):
    q = slow.any_floats8(40, 96, block=(128, 128))
    tensors = q.tensors("weight_scale_inv", torch.float32)
    tensors["weight_scale_inv"] = torch.full((1, 1), 127, dtype=torch.uint8)
    write(tmp_path, tensors, FP8)
    with pytest.raises(CheckpointError, match=r"weight_scale_inv is U8 .* should be"):
        open_checkpoint(tmp_path)


def test_signed_bytes_are_pairs_only_if_declared(tmp_path: Path):
    q = mx.any_microscaled(16, 64, bits=4)
    tensors = {"weight": q.bytes_.view(torch.int8), "scale": q.scales.view(torch.float8_e8m0fnu)}
    write(tmp_path, tensors, FP8)
    with pytest.raises(CheckpointError, match=r"weight_scale_inv is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("bits", [4, 8])
def test_exponents_that_are_no_number(tmp_path: Path, bits: int):
    q = mx.any_microscaled(16, 64, bits=bits)
    q.exponents[3][1] = 255
    write(tmp_path, mx.compressed(q), mx.compressed_config(bits=bits))
    for formats in ("", "f32"):
        with pytest.raises(CheckpointError, match="1 of 32 scales are not finite"):
            load(tmp_path, 16, 64, formats)
    q.exponents[3][1] = 254  # a value of float32 is not
    write(tmp_path, mx.compressed(q), mx.compressed_config(bits=bits))
    with pytest.raises(CheckpointError, match="not finite"):
        load(tmp_path, 16, 64)


@pytest.mark.parametrize("bits", [4, 8])
def test_tensors_that_contradict_the_declaration(tmp_path: Path, bits: int):
    config = mx.compressed_config(bits=bits)
    tensors = mx.compressed(mx.any_microscaled(24, 64, bits=bits))
    for part, tensor in tensors.items():
        rest = {k: v for k, v in tensors.items() if k != part}
        write(tmp_path, rest, config)
        with pytest.raises(CheckpointError, match=r"is missing|there are none"):
            open_checkpoint(tmp_path)
        raw = tensor.view(torch.uint8)
        for bad in (raw[:-1], raw[:, :-1], raw[None], raw.T, tensor.float()):
            write(tmp_path, rest | {part: bad.contiguous()}, config)
            with pytest.raises(CheckpointError, match=r"a\.q_proj\.weight"):
                load(tmp_path, 24, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 16}, "groups of 16 instead of 32"),
        ({"symmetric": False}, "with zero points"),
        ({"num_bits": 8}, "with 8 bits"),
        ({"type": "int"}, "weight type 'int'"),
    ],
)
def test_settings_that_are_not_read(tmp_path: Path, change: dict[str, object], message: str):
    config = mx.compressed_config(bits=4)
    config["config_groups"]["group_0"]["weights"] |= change
    write(tmp_path, mx.compressed(mx.any_microscaled(16, 64, bits=4)), config)
    with pytest.raises(UnsupportedFormat, match=message):
        open_checkpoint(tmp_path)


def test_stacked_blocks_that_contradict_each_other(tmp_path: Path):
    blocks, scales = mx.blocks([mx.any_microscaled(8, 64, bits=4, seed=n) for n in range(3)])
    declared = {"quant_method": "mxfp4"}
    good = {"up_blocks": blocks, "up_scales": scales}
    write(tmp_path, good, declared)
    with open_checkpoint(tmp_path) as checkpoint:
        info = checkpoint.info("a.q_proj.up")
        assert (info.shape, info.dtype) == ((3, 8, 64), "mxfp4")
        assert info.stored_nbytes == blocks.numel() + scales.numel()
    for part, tensor in good.items():
        rest = {k: v for k, v in good.items() if k != part}
        for bad in (tensor[:-1], tensor[..., :-1], tensor[0], tensor.to(torch.int32)):
            write(tmp_path, rest | {part: bad.contiguous()}, declared)
            with pytest.raises(CheckpointError, match=r"a\.q_proj\.up_(blocks|scales) is"):
                open_checkpoint(tmp_path)
    write(tmp_path, {"up_blocks": blocks}, declared)
    with pytest.raises(CheckpointError, match=r"up_scales is missing"):
        open_checkpoint(tmp_path)
    write(tmp_path, good | {"up": torch.zeros(3, 8, 64)}, declared)
    with pytest.raises(CheckpointError, match="are both there"):
        open_checkpoint(tmp_path)
    write(tmp_path, good, None)
    with pytest.raises(UnsupportedFormat, match="up_blocks holds packed codes"):
        open_checkpoint(tmp_path)


def compressed_nvfp4() -> dict[str, object]:
    config = slow.compressed_config(bits=4, group=16, symmetric=True, format="nvfp4-pack-quantized")
    config["config_groups"]["group_0"]["weights"] |= {"type": "float", "strategy": "tensor_group"}
    return config


@pytest.mark.parametrize(("rows", "cols"), [(40, 96), (16, 128), (24, 272), (5, 48)])
def test_two_levels_of_scales(tmp_path: Path, rows: int, cols: int):
    q = mx.any_two_levels(rows, cols)
    write(tmp_path, q.tensors("weight", "weight_scale_2", q.factor), mx.MODELOPT_NVFP4)
    weight = load(tmp_path, rows, cols)
    assert weight.format_name == "nvfp4s"
    assert torch.equal(weight.unpack(), q.floats())
    assert torch.equal(load(tmp_path, rows, cols, "f32").unpack(), q.floats())
    # compressed-tensors divides; the reciprocal is rounded once.
    divisor = slow.single(1 / q.factor)
    q.factor = slow.single(1 / divisor)
    write(tmp_path, q.tensors("weight_packed", "weight_global_scale", divisor), compressed_nvfp4())
    weight = load(tmp_path, rows, cols)
    assert weight.format_name == "nvfp4s"
    assert torch.equal(weight.unpack(), q.floats())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_factors_that_are_no_number(tmp_path: Path, value: float):
    q = mx.any_two_levels(16, 64)
    tensors = q.tensors("weight_packed", "weight_global_scale", value)
    write(tmp_path, tensors, compressed_nvfp4())
    with pytest.raises(CheckpointError, match=r"weight_global_scale is (nan|inf|0)"):
        load(tmp_path, 16, 64)


def test_two_levels_that_contradict_the_declaration(tmp_path: Path):
    q = mx.any_two_levels(24, 64)
    tensors = q.tensors("weight", "weight_scale_2", q.factor)
    for part in tensors:
        rest = {k: v for k, v in tensors.items() if k != part}
        write(tmp_path, rest, mx.MODELOPT_NVFP4)
        with pytest.raises(CheckpointError, match=r"is missing|there are none"):
            open_checkpoint(tmp_path)
    for bad in (tensors["weight_scale"].float(), tensors["weight_scale"][:, :2].contiguous()):
        write(tmp_path, tensors | {"weight_scale": bad}, mx.MODELOPT_NVFP4)
        with pytest.raises(
            CheckpointError, match=r"weight_scale is .* should be F8_E4M3 \[24, 4\]"
        ):
            open_checkpoint(tmp_path)
    tensors["weight_scale"].view(torch.uint8)[3, 1] = 0x7F
    write(tmp_path, tensors, mx.MODELOPT_NVFP4)
    with pytest.raises(CheckpointError, match="1 of 96 scales are not finite"):
        load(tmp_path, 24, 64)


def test_modelopt_8_bit_floats(tmp_path: Path):
    q = mx.any_microscaled(40, 96, bits=8)
    write(tmp_path, mx.compressed(q), {"quant_method": "modelopt", "quant_algo": "MXFP8"})
    check(tmp_path, q, "fp8-g32")
    one = slow.any_floats8(40, 96, block=(10**6, 10**6))
    tensors = one.tensors("weight_scale", torch.float32)
    tensors["weight_scale"] = tensors["weight_scale"].view(())
    write(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "FP8"})
    weight = load(tmp_path, 40, 96)
    assert weight.format_name == "fp8-row"
    assert torch.equal(weight.unpack(), one.floats())

"""Single weights of quantized checkpoints, against a decoder that works element by element."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import GROUPS, check, load, write
from tiny_checkpoints import vector
from torch import Tensor

import slow_quantizers as slow
from moestro.checkpoints import open_checkpoint
from moestro.core.errors import CheckpointError, MoestroError, UnsupportedFormat
from moestro.memory.loader import load_weights
from moestro.memory.policy import FormatPolicy

#: (rows, cols): more than one tile, odd numbers of groups, a ragged last one
SHAPES = [(40, 96), (16, 160), (24, 320), (8, 32)]


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", GROUPS)
def test_gptq_4_bit(
    tmp_path: Path, rows: int, cols: int, version: int, symmetric: bool, group: int
):
    q = slow.any_codes(rows, cols, bits=4, group=group, symmetric=symmetric, seed=group)
    config = slow.gptq_config(bits=4, group=group, symmetric=symmetric, version=version)
    write(tmp_path, slow.gptq(q, version=version), config)
    name = f"int4-{GROUPS[group]}" if symmetric else f"int4z-{GROUPS[group]}"
    check(tmp_path, q, "int4z-g128" if name == "int4z-row" else name)


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group", GROUPS)
def test_gptq_8_bit(tmp_path: Path, rows: int, cols: int, version: int, group: int):
    q = slow.any_codes(rows, cols, bits=8, group=group, symmetric=True)
    config = slow.gptq_config(bits=8, group=group, symmetric=True, version=version)
    write(tmp_path, slow.gptq(q, version=version), config)
    check(tmp_path, q, f"int8-{GROUPS[group]}")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group", GROUPS)
def test_gptq_8_bit_with_zero_points(tmp_path: Path, version: int, group: int):
    q = slow.any_codes(24, 320, bits=8, group=group, symmetric=False)
    config = slow.gptq_config(bits=8, group=group, symmetric=False, version=version)
    write(tmp_path, slow.gptq(q, version=version), config)
    check(tmp_path, q, f"int8z-{GROUPS[group]}".replace("row", "g128"))


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_awq(tmp_path: Path, rows: int, cols: int, group: int):
    q = slow.any_codes(rows, cols, bits=4, group=group, symmetric=False, seed=3)
    write(tmp_path, slow.awq(q), slow.awq_config(group=group))
    check(tmp_path, q, "int4z-g128" if group == -1 else f"int4z-{GROUPS[group]}")


@pytest.mark.parametrize(("rows", "cols"), [(40, 128), (13, 1152), (24, 2304)])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_awq_gemv(tmp_path: Path, rows: int, cols: int, group: int):
    q = slow.any_codes(rows, cols, bits=4, group=group, symmetric=False, seed=3)
    config = slow.awq_config(group=group) | {"version": "gemv"}
    write(tmp_path, slow.awq_gemv(q), config)
    check(tmp_path, q, f"int4z-{GROUPS[group]}")
    write(tmp_path, slow.awq_gemv(q), slow.awq_config(group=group))
    with pytest.raises(CheckpointError, match="it should be"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("rows", "cols"), [*SHAPES, (13, 45)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_compressed_symmetric(tmp_path: Path, rows: int, cols: int, bits: int, group: int):
    q = slow.any_codes(rows, cols, bits=bits, group=group, symmetric=True, seed=4)
    config = slow.compressed_config(bits=bits, group=group, symmetric=True)
    write(tmp_path, slow.compressed(q, symmetric=True), config)
    check(tmp_path, q, f"int{bits}-{GROUPS[group]}")


@pytest.mark.parametrize(("rows", "cols"), [*SHAPES, (13, 45)])
@pytest.mark.parametrize("packed_zeros", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_compressed_with_zero_points(
    tmp_path: Path, rows: int, cols: int, packed_zeros: bool, group: int
):
    q = slow.any_codes(rows, cols, bits=4, group=group, symmetric=False, seed=5)
    config = slow.compressed_config(bits=4, group=group, symmetric=False)
    write(tmp_path, slow.compressed(q, symmetric=False, packed_zeros=packed_zeros), config)
    check(tmp_path, q, "int4z-g128" if group == -1 else f"int4z-{GROUPS[group]}")


@pytest.mark.parametrize("flat", [True, False])
def test_compressed_signed_bytes(tmp_path: Path, flat: bool):
    q = slow.any_codes(20, 70, bits=8, group=-1, symmetric=True, seed=6)
    tensors = slow.signed_bytes(q)
    if flat:  # scales [N] instead of [N, 1]
        tensors["weight_scale"] = tensors["weight_scale"].view(-1)
    config = slow.compressed_config(bits=8, group=-1, symmetric=True, format="int-quantized")
    write(tmp_path, tensors, config)
    check(tmp_path, q, "int8-row")


@pytest.mark.parametrize("scale_type", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_of_any_type_that_are_float16_numbers(tmp_path: Path, scale_type: torch.dtype):
    q = slow.any_codes(16, 64, bits=4, group=32, symmetric=False)
    config = slow.gptq_config(bits=4, group=32, symmetric=False)
    write(tmp_path, slow.gptq(q, scale_type=scale_type), config)
    check(tmp_path, q, "int4z-g32")


@pytest.mark.parametrize(
    ("scale", "scale_type"),
    [(1e-9, torch.bfloat16), (70000.0, torch.bfloat16), (0.1, torch.float32)],
)
def test_scales_that_float16_does_not_hold(tmp_path: Path, scale: float, scale_type: torch.dtype):
    q = slow.any_codes(16, 64, bits=4, group=32, symmetric=True)
    q.scales[3][1] = float(torch.tensor(scale, dtype=scale_type))
    config = slow.compressed_config(bits=4, group=32, symmetric=True)
    write(tmp_path, slow.compressed(q, symmetric=True, scale_type=scale_type), config)
    with pytest.raises(
        UnsupportedFormat, match=r"a\.q_proj\.weight: 1 of 32 scales .*--format int4"
    ):
        load(tmp_path, 16, 64)
    # A float format holds all of it, and naming the same format rounds.
    assert torch.equal(load(tmp_path, 16, 64, formats="f32").unpack(), q.floats())
    if scale < 1:
        rounded = load(tmp_path, 16, 64, formats="int4-g32").unpack()
        assert (rounded - q.floats()).abs().max() <= 8 * max(scale * 2**-11, 2**-25)


def test_another_format_is_quantized_from_the_values(tmp_path: Path):
    q = slow.any_codes(16, 64, bits=4, group=32, symmetric=False)
    write(tmp_path, slow.awq(q), slow.awq_config(group=32))
    weight = load(tmp_path, 16, 64, formats="int8-g32")
    assert weight.format_name == "int8-g32"
    error = (weight.unpack() - q.floats()).abs().max() / q.floats().abs().max()
    assert 0 < error < 0.01


def test_symmetric_gptq_with_meaningless_zero_points(tmp_path: Path):
    q = slow.any_codes(16, 64, bits=4, group=32, symmetric=True)
    config = slow.gptq_config(bits=4, group=32, symmetric=True)
    for stored in (0, 0x77777777, 0x88888888 - (1 << 32)):
        tensors = slow.gptq(q)
        tensors["qzeros"].fill_(stored)
        write(tmp_path, tensors, config)
        check(tmp_path, q, "int4-g32")
    tensors.pop("qzeros")
    write(tmp_path, tensors, config)
    check(tmp_path, q, "int4-g32")
    for bad in (0x77777776, 0x55555555):
        tensors["qzeros"] = torch.full((2, 2), bad, dtype=torch.int32)
        write(tmp_path, tensors, config)
        with pytest.raises(
            CheckpointError, match=r"qzeros holds zero points other than the middle"
        ):
            load(tmp_path, 16, 64)


def test_gptq_without_a_word_on_symmetry_reads_the_zero_points(tmp_path: Path):
    q = slow.any_codes(16, 64, bits=4, group=32, symmetric=False)
    config = slow.gptq_config(bits=4, group=32, symmetric=False)
    del config["sym"], config["checkpoint_format"]
    write(tmp_path, slow.gptq(q), config)
    check(tmp_path, q, "int4z-g32")


def test_symmetric_compressed_with_zero_points(tmp_path: Path):
    q = slow.any_codes(16, 64, bits=4, group=32, symmetric=True)
    config = slow.compressed_config(bits=4, group=32, symmetric=True)
    for packed in (True, False):
        tensors = slow.compressed(q, symmetric=False, packed_zeros=packed)
        write(tmp_path, tensors, config)
        check(tmp_path, q, "int4-g32")
        tensors["weight_zero_point"][0, 0] += 1
        write(tmp_path, tensors, config)
        with pytest.raises(CheckpointError, match="declared symmetric"):
            load(tmp_path, 16, 64)


def test_zero_points_beyond_the_bits(tmp_path: Path):
    q = slow.any_codes(16, 64, bits=4, group=32, symmetric=False)
    tensors = slow.compressed(q, symmetric=False, packed_zeros=False)
    tensors["weight_zero_point"][2, 1] = 8
    write(tmp_path, tensors, slow.compressed_config(bits=4, group=32, symmetric=False))
    with pytest.raises(CheckpointError, match="which 4 bits do not have"):
        load(tmp_path, 16, 64)


def test_non_finite_scales(tmp_path: Path):
    q = slow.any_codes(16, 64, bits=4, group=32, symmetric=True)
    for value in (float("nan"), float("inf")):
        tensors = slow.gptq(q)
        tensors["scales"][1, 3] = value
        write(tmp_path, tensors, slow.gptq_config(bits=4, group=32, symmetric=True))
        for formats in ("", "f32"):
            with pytest.raises(CheckpointError, match=r"a\.q_proj\.scales: 1 of 32 scales"):
                load(tmp_path, 16, 64, formats)


def _gptq(symmetric: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    q = slow.any_codes(24, 64, bits=4, group=32, symmetric=symmetric)
    return slow.gptq(q), slow.gptq_config(bits=4, group=32, symmetric=symmetric)


def _awq() -> tuple[dict[str, Tensor], dict[str, Any]]:
    q = slow.any_codes(24, 64, bits=4, group=32, symmetric=False)
    return slow.awq(q), slow.awq_config(group=32)


def _compressed() -> tuple[dict[str, Tensor], dict[str, Any]]:
    q = slow.any_codes(24, 64, bits=4, group=32, symmetric=False)
    config = slow.compressed_config(bits=4, group=32, symmetric=False)
    return slow.compressed(q, symmetric=False), config


def _gemv() -> tuple[dict[str, Tensor], dict[str, Any]]:
    q = slow.any_codes(24, 64, bits=4, group=32, symmetric=False)
    return slow.awq_gemv(q), slow.awq_config(group=32) | {"version": "gemv"}


METHODS = {"gptq": _gptq, "awq": _awq, "gemv": _gemv, "compressed": _compressed}


@pytest.mark.parametrize("method", METHODS)
def test_every_missing_tensor_is_named(tmp_path: Path, method: str):
    tensors, config = METHODS[method]()
    for part in tensors.keys() - {"g_idx"}:
        write(tmp_path, {k: v for k, v in tensors.items() if k != part}, config)
        expected = f"a.q_proj.{part} is missing"
        if part in ("qweight", "weight_packed"):
            expected = "belongs to integer codes, but there are none"
        with pytest.raises(CheckpointError, match=expected):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize("method", METHODS)
def test_wrong_shapes_and_types(tmp_path: Path, method: str):
    tensors, config = METHODS[method]()
    for part, tensor in tensors.items():
        wrong = [tensor[:-1], torch.cat([tensor, tensor]), tensor[None]]
        wrong.append(tensor.to(torch.int16 if tensor.dtype != torch.int16 else torch.int32))
        if tensor.dim() == 2:
            wrong += [tensor[:, :-1], tensor.T]
        for bad in wrong:
            write(tmp_path, tensors | {part: bad.contiguous()}, config)
            with pytest.raises(MoestroError, match=r"a\.q_proj\.(q|s|g|weight)"):
                load(tmp_path, 24, 64)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("group", [64, 128, -1])
def test_group_size_that_the_scales_deny(tmp_path: Path, method: str, group: int):
    tensors, config = METHODS[method]()
    if method == "compressed":
        weights = slow.weights_config(bits=4, group=group, symmetric=False)
        config["config_groups"]["group_0"]["weights"] = weights
    else:
        config["group_size"] = group
    write(tmp_path, tensors, config)
    with pytest.raises(MoestroError, match=r"it should be|gemv with one scale per row"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("method", ["gptq", "compressed"])
def test_bits_that_the_shapes_deny(tmp_path: Path, method: str):
    tensors, config = METHODS[method]()
    if method == "compressed":
        weights = slow.weights_config(bits=8, group=32, symmetric=True)
        config["config_groups"]["group_0"]["weights"] = weights
    else:
        config |= {"bits": 8, "sym": True}
    write(tmp_path, tensors, config)
    with pytest.raises(CheckpointError, match=r"should be|says"):
        open_checkpoint(tmp_path)


def test_gemv_layout_under_a_gemm_name(tmp_path: Path):
    """Transposed words: K / 8 along the row."""
    tensors, config = _awq()
    q = slow.any_codes(24, 64, bits=4, group=32, symmetric=False)
    write(tmp_path, tensors | {"qweight": slow.words(q.codes, 4)}, config)
    with pytest.raises(CheckpointError, match="it should be"):
        open_checkpoint(tmp_path)


def test_method_and_tensors_that_do_not_belong_together(tmp_path: Path):
    gptq, gptq_config = _gptq()
    compressed, compressed_config = _compressed()
    write(tmp_path, compressed, gptq_config)
    with pytest.raises(CheckpointError, match=r"gptq .* stores a\.q_proj\.qweight"):
        open_checkpoint(tmp_path)
    write(tmp_path, gptq, compressed_config)
    with pytest.raises(CheckpointError, match=r"stores a\.q_proj\.weight_packed"):
        open_checkpoint(tmp_path)
    write(tmp_path, gptq | {"weight": torch.zeros(24, 64)}, gptq_config)
    with pytest.raises(CheckpointError, match="are both there"):
        open_checkpoint(tmp_path)
    write(tmp_path, {"weight": torch.zeros(24, 64), "scales": gptq["scales"]}, gptq_config)
    with pytest.raises(CheckpointError, match=r"a\.q_proj\.weight is F32"):
        open_checkpoint(tmp_path)
    write(tmp_path, gptq, None)
    with pytest.raises(UnsupportedFormat, match=r"q_proj\.qweight holds packed codes"):
        open_checkpoint(tmp_path)


def test_the_model_decides_the_shape(tmp_path: Path):
    write(tmp_path, *_gptq())
    for rows, cols in ((64, 24), (24, 32), (8, 64)):
        with pytest.raises(CheckpointError, match=r"a\.q_proj\.weight should be"):
            load(tmp_path, rows, cols)


def test_a_vector_is_not_read_from_codes(tmp_path: Path):
    q = slow.any_codes(1, 64, bits=4, group=32, symmetric=True)
    config = slow.compressed_config(bits=4, group=32, symmetric=True)
    write(tmp_path, slow.compressed(q, symmetric=True), config)
    spec = replace(vector("a", 64), sources=("a.q_proj.weight",))
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(MoestroError, match=r"a\.q_proj\.weight"),
    ):
        load_weights(checkpoint, [spec], policy=FormatPolicy.parse(""))

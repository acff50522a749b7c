"""Single weights of checkpoints in 8-bit floats, against a decoder that works bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import check, load, write

import slow_quantizers as slow
from moestro.checkpoints import open_checkpoint
from moestro.core.errors import CheckpointError

#: rows and columns that share a scale, the format, and how it is declared
FLOATS8 = {
    "block": ((128, 128), "fp8-g128"),
    "narrow-block": ((16, 64), "fp8-g64"),
    "channel": ((1, 10**6), "fp8-row"),
    "tensor": ((10**6, 10**6), "fp8-row"),
}


@pytest.mark.parametrize(("rows", "cols"), [(40, 96), (200, 300), (128, 256), (129, 129)])
@pytest.mark.parametrize("kind", FLOATS8)
@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16])
def test_8_bit_floats(tmp_path: Path, rows: int, cols: int, kind: str, scale_type: torch.dtype):
    block, name = FLOATS8[kind]
    q = slow.any_floats8(rows, cols, block=block)
    q.scales = [torch.tensor(s).to(scale_type).tolist() for s in q.scales]
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    weights |= {"strategy": kind.removeprefix("narrow-"), "block_structure": list(block)}
    compressed = slow.compressed_config(bits=8, group=-1, symmetric=True, format="float-quantized")
    compressed["config_groups"]["group_0"]["weights"] = weights
    tensors = q.tensors("weight_scale", scale_type)
    write(tmp_path, tensors, compressed)
    check(tmp_path, q, name)
    fp8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    if "block" in kind:
        tensors["weight_scale_inv"] = tensors.pop("weight_scale")
        write(tmp_path, tensors, fp8 | {"weight_block_size": list(block)})
        check(tmp_path, q, name)
    else:  # scales of fewer axes
        flat = tensors["weight_scale"].view(-1)
        for scales in (flat, flat.view(())) if kind == "tensor" else (flat,):
            write(tmp_path, tensors | {"weight_scale": scales}, compressed)
            check(tmp_path, q, name)
    if kind == "tensor":
        write(tmp_path, tensors, fp8)
        check(tmp_path, q, name)


def test_8_bit_floats_that_contradict_their_declaration(tmp_path: Path):
    q = slow.any_floats8(200, 300, block=(128, 128))
    tensors = q.tensors("weight_scale_inv", torch.float32)
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for bad in (tensors["weight_scale_inv"].T.contiguous(), torch.ones(2, 2), torch.ones(200, 1)):
        write(tmp_path, tensors | {"weight_scale_inv": bad}, fp8)
        with pytest.raises(CheckpointError, match=r"weight_scale_inv is F32 .* should be"):
            open_checkpoint(tmp_path)
    write(tmp_path, {"weight": tensors["weight"]}, fp8)
    with pytest.raises(CheckpointError, match=r"weight_scale_inv is missing"):
        open_checkpoint(tmp_path)
    write(tmp_path, tensors | {"weight": torch.zeros(200, 300, dtype=torch.int8)}, fp8)
    with pytest.raises(CheckpointError, match=r"weight is I8 .* should be F8_E4M3"):
        open_checkpoint(tmp_path)
    write(tmp_path, tensors | {"weight": torch.zeros(200, 300)}, fp8)
    with pytest.raises(CheckpointError, match=r"weight is F32"):
        open_checkpoint(tmp_path)
    tensors["weight"].view(torch.uint8)[3, 4] = 0xFF
    write(tmp_path, tensors, fp8)
    for formats in ("", "f32", "int8-g32"):
        with pytest.raises(CheckpointError, match=r"a\.q_proj\.weight: .*not finite"):
            load(tmp_path, 200, 300, formats)


def test_8_bit_floats_in_another_format(tmp_path: Path):
    q = slow.any_floats8(40, 256, block=(128, 128))
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write(tmp_path, q.tensors("weight_scale_inv", torch.float32), fp8)
    assert torch.equal(load(tmp_path, 40, 256, "f32").unpack(), q.floats())
    close = load(tmp_path, 40, 256, "int8-g32").unpack()
    assert 0 < (close - q.floats()).norm() / q.floats().norm() < 0.01

"""Single weights as bitsandbytes stores them, against a decoder that works number by number.

The numbers of nf4 are those published with it (arXiv:2305.14314, appendix E).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import load, write
from torch import Tensor

import slow_quantizers as slow
from moestro.checkpoints import open_checkpoint
from moestro.core.errors import CheckpointError, UnsupportedFormat

NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
       0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
       0.7229568362236023, 1.0]  # fmt: skip
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def stored(
    rows: int, cols: int, *, block: int = 64, nested: bool = False, kind: str = "nf4"
) -> tuple[dict[str, Tensor], Tensor]:
    """(tensors, the decoded weight)."""
    rng = random.Random(rows)
    codes = [rng.randrange(16) for _ in range(rows * cols)]
    blocks = -(-rows * cols // block)
    scales = [slow.single(rng.uniform(0.01, 1)) for _ in range(blocks)]
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16",
                             "shape": [rows, cols]}  # fmt: skip
    tensors = {
        "weight": torch.tensor(
            [[16 * codes[i] + codes[i + 1]] for i in range(0, rows * cols, 2)], dtype=torch.uint8
        ),
        "weight.quant_map": torch.tensor(NF4),
        "weight.absmax": torch.tensor(scales),
    }
    if nested:
        table = [slow.single(rng.uniform(-1, 1)) for _ in range(256)]
        bytes_ = [rng.randrange(256) for _ in range(blocks)]
        above = [slow.single(rng.uniform(0.1, 0.5)) for _ in range(-(-blocks // 4))]
        offset = 0.0712890625
        products = [slow.single(table[b] * above[i // 4]) for i, b in enumerate(bytes_)]
        scales = [slow.single(product + offset) for product in products]
        tensors["weight.absmax"] = torch.tensor(bytes_, dtype=torch.uint8)
        tensors["weight.nested_absmax"] = torch.tensor(above)
        tensors["weight.nested_quant_map"] = torch.tensor(table)
        state |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": offset}
    text = json.dumps(state).encode()
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text)).byte()
    values = [slow.single(slow.single(NF4[c]) * scales[i // block]) for i, c in enumerate(codes)]
    return tensors, torch.tensor(values).view(rows, cols)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(("rows", "cols", "block"), [(24, 128, 64), (7, 256, 128), (5, 64, 64)])
def test_4_bits(tmp_path: Path, kind: str, nested: bool, rows: int, cols: int, block: int):
    tensors, values = stored(rows, cols, block=block, nested=nested, kind=kind)
    write(tmp_path, tensors, FOUR)
    assert torch.equal(load(tmp_path, rows, cols, "f32").unpack(), values)
    assert torch.equal(load(tmp_path, rows, cols, "bf16").unpack(), values.bfloat16().float())
    close = load(tmp_path, rows, cols, "int8-g32").unpack()
    assert 0 < (close - values).norm() / values.norm() < 0.01
    with pytest.raises(UnsupportedFormat, match=rf"no format holds {kind.upper()} .*--format"):
        load(tmp_path, rows, cols)


def test_8_bits(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (24, 70), generator=generator).to(torch.int8)
    largest = torch.rand(24, generator=generator)
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.zeros((), dtype=torch.uint8)}
    write(tmp_path, tensors, EIGHT)
    values = codes.double() * (largest.double() / 127)[:, None]
    found = load(tmp_path, 24, 70, "f32").unpack().double()
    assert (found - values).abs().max() <= 2**-23 * values.abs().max()
    rounded = load(tmp_path, 24, 70, "int8-row").unpack().double()
    assert (rounded - values).abs().max() <= 2**-10 * values.abs().max()
    with pytest.raises(UnsupportedFormat, match=r"scales .* are not float16 .*--format int8-row"):
        load(tmp_path, 24, 70)
    tiled = tensors | {"weight_format": torch.ones((), dtype=torch.uint8)}
    write(tmp_path, tiled, EIGHT)
    with pytest.raises(UnsupportedFormat, match="weight_format: bytes in the order of a GPU"):
        open_checkpoint(tmp_path)
    write(tmp_path, tensors | {"SCB": largest[:-1]}, EIGHT)
    with pytest.raises(CheckpointError, match=r"SCB is F32 \[23\]"):
        open_checkpoint(tmp_path)
    write(tmp_path, {"weight": codes}, EIGHT)
    with pytest.raises(CheckpointError, match=r"SCB is missing"):
        open_checkpoint(tmp_path)


def test_rows_that_are_not_whole_blocks(tmp_path: Path):
    tensors, _ = stored(8, 96, block=64)
    write(tmp_path, tensors, FOUR)
    with pytest.raises(UnsupportedFormat, match="rows of 96 weights are no whole blocks of 64"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("nested", [True, False])
def test_missing_and_misshapen_tensors(tmp_path: Path, nested: bool):
    tensors, _ = stored(24, 128, nested=nested)
    for part, tensor in tensors.items():
        rest = {k: v for k, v in tensors.items() if k != part}
        if part != "weight":
            write(tmp_path, rest, FOUR)
            with pytest.raises(CheckpointError, match=r"is missing|should be F32"):
                open_checkpoint(tmp_path)
        write(tmp_path, rest | {part: tensor[:-1].contiguous()}, FOUR)
        with pytest.raises(CheckpointError, match=r"a\.q_proj\.weight"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [24]}, "shape is"),
        ({"shape": [24, 0]}, "shape is 0, not a count"),
        ({"shape": [24, 130]}, "has 1536 bytes of two codes"),
        ({"shape": [24, True]}, "shape is True, not a count"),
        ({"blocksize": 0}, "blocksize is 0"),
        ({"blocksize": "64"}, "blocksize is '64'"),
        ({"nested_blocksize": -1}, "nested_blocksize is -1"),
        ({"nested_offset": "x"}, "nested_offset is 'x'"),
        ({"nested_offset": float("nan")}, "nested_offset is"),
    ],
)
def test_malformed_states(tmp_path: Path, change: dict[str, Any], message: str):
    tensors, _ = stored(24, 128, nested=True)
    name = "weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist())) | change
    tensors[name] = torch.tensor(list(json.dumps(state).encode())).byte()
    write(tmp_path, tensors, FOUR)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff\xfe", b"3"])
def test_states_that_are_none(tmp_path: Path, text: bytes):
    tensors, _ = stored(24, 128)
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text)).byte()
    write(tmp_path, tensors, FOUR)
    with pytest.raises(CheckpointError, match=r"bitsandbytes__nf4: "):
        open_checkpoint(tmp_path)


def test_numbers_that_are_none(tmp_path: Path):
    for part, match in (("weight.quant_map", "is not finite"), ("weight.absmax", "1 of 48 scales")):
        tensors, _ = stored(24, 128)
        tensors[part][3] = torch.nan
        write(tmp_path, tensors, FOUR)
        with pytest.raises(CheckpointError, match=match):
            load(tmp_path, 24, 128, "f32")


def test_neither_4_nor_8_bits(tmp_path: Path):
    write(tmp_path, stored(24, 128)[0], {"quant_method": "bitsandbytes"})
    with pytest.raises(UnsupportedFormat, match="neither 4 nor 8 bits"):
        open_checkpoint(tmp_path)

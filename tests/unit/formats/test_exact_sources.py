"""Repacked GGUF blocks decode to exactly what the gguf package's dequantizer gives."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro import formats
from moestro.core.errors import CheckpointError, UnsupportedFormat

# type -> (elements, bytes, offsets of float16 fields) of a block
BLOCKS = {
    "Q8_0": (32, 34, (0,)),
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q4_K": (256, 144, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}


def blocks(source_type: str, rows: int, per_row: int, rng: np.random.Generator) -> np.ndarray:
    """Random blocks uint8 [rows, bytes] with finite float16 fields of every magnitude and sign."""
    _, nbytes, fields = BLOCKS[source_type]
    raw = rng.integers(0, 256, (rows, per_row, nbytes), dtype=np.uint8)
    for at in fields:
        bits = rng.integers(
            0, 0x7C00, (rows, per_row), dtype=np.uint16
        )  # all finite, subnormals too
        bits |= rng.integers(0, 2, (rows, per_row), dtype=np.uint16) << 15
        raw[:, :, at : at + 2] = bits[:, :, None].view(np.uint8)
    return raw.reshape(rows, -1)


def check(source_type: str, raw: np.ndarray) -> None:
    rows, cols = raw.shape[0], raw.shape[1] // BLOCKS[source_type][1] * BLOCKS[source_type][0]
    want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[source_type])
    format_ = formats.exact_for(source_type)
    packed = format_.pack_exact(source_type, torch.from_numpy(raw).view(-1), rows, cols)
    assert np.array_equal(format_.unpack(packed, rows, cols).numpy(), want)


@pytest.mark.parametrize("source_type", BLOCKS)
@settings(max_examples=12, deadline=None)
@given(rows=st.integers(1, 40), per_row=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_random_blocks(source_type, rows, per_row, seed):
    check(source_type, blocks(source_type, rows, per_row, np.random.default_rng(seed)))


@pytest.mark.parametrize("source_type", BLOCKS)
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x80, 0x7F, 0x88])
def test_extreme_codes(source_type, fill):
    raw = blocks(source_type, 18, 2, np.random.default_rng(fill))
    _, nbytes, fields = BLOCKS[source_type]
    wide = raw.reshape(18, 2, nbytes)
    keep = np.zeros(nbytes, dtype=bool)
    for at in fields:
        keep[at : at + 2] = True
    wide[:, :, ~keep] = fill
    check(source_type, raw)


@pytest.mark.parametrize("source_type", BLOCKS)
def test_many_rows_cross_the_chunks_of_work(source_type):
    elements = BLOCKS[source_type][0]
    per_row = 1024 // elements
    check(source_type, blocks(source_type, 400, per_row, np.random.default_rng(5)))


@pytest.mark.parametrize("source_type", BLOCKS)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_infinite_and_nan_scales_are_refused(source_type, bits):
    raw = blocks(source_type, 16, 1, np.random.default_rng(0))
    at = BLOCKS[source_type][2][-1]
    raw[3, at : at + 2] = np.array([bits], dtype=np.uint16).view(np.uint8)
    format_ = formats.exact_for(source_type)
    with pytest.raises(CheckpointError, match="1 of 16 weights are not finite"):
        format_.pack_exact(source_type, torch.from_numpy(raw).view(-1), 16, BLOCKS[source_type][0])


@pytest.mark.parametrize(("source_type", "dtype"), [("F32", torch.float32), ("F16", torch.float16),
                                                     ("BF16", torch.bfloat16)])  # fmt: skip
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (16, 32), (19, 45)])
def test_float_tensors_keep_every_bit(source_type, dtype, rows, cols):
    values = torch.randn(rows, cols).to(dtype)
    values[0, 0] = torch.finfo(dtype).tiny / 2  # subnormal
    raw = values.view(torch.uint8).reshape(-1)
    format_ = formats.exact_for(source_type)
    packed = format_.pack_exact(source_type, raw, rows, cols)
    assert torch.equal(format_.unpack(packed, rows, cols), values.to(torch.float32))
    assert torch.equal(packed, format_.pack(values))


@pytest.mark.parametrize("name", formats.names())
def test_other_sources_are_refused_by_name(name):
    format_ = formats.get(name)
    with pytest.raises(UnsupportedFormat, match=f"{name} cannot hold Q5_K"):
        format_.pack_exact("Q5_K", torch.zeros(176, dtype=torch.uint8), 1, 256)

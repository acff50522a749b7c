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
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "IQ4_NL": (32, 18, (0,)),
    "MXFP4": (32, 17, ()),
    "IQ4_XS": (256, 136, (0,)),
    "Q2_K": (256, 84, (80, 82)),
    "Q3_K": (256, 110, (108,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}


# Of MXFP4's exponents the last with which all its values are finite float32 numbers.
LARGEST_EXPONENT = 252


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
    if source_type == "MXFP4":
        raw[:, :, 0] %= LARGEST_EXPONENT + 1
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
    keep[0] |= source_type == "MXFP4"
    wide[:, :, ~keep] = fill
    check(source_type, raw)


@pytest.mark.parametrize("source_type", BLOCKS)
def test_many_rows_cross_the_chunks_of_work(source_type):
    elements = BLOCKS[source_type][0]
    per_row = 1024 // elements
    check(source_type, blocks(source_type, 400, per_row, np.random.default_rng(5)))


@pytest.mark.parametrize("source_type", [kind for kind in BLOCKS if BLOCKS[kind][2]])
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_infinite_and_nan_scales_are_refused(source_type, bits):
    raw = blocks(source_type, 16, 1, np.random.default_rng(0))
    at = BLOCKS[source_type][2][-1]
    raw[3, at : at + 2] = np.array([bits], dtype=np.uint16).view(np.uint8)
    format_ = formats.exact_for(source_type)
    with pytest.raises(CheckpointError, match="1 of 16 weights are not finite"):
        format_.pack_exact(source_type, torch.from_numpy(raw).view(-1), 16, BLOCKS[source_type][0])


@pytest.mark.parametrize("exponent", range(256))
def test_every_shared_exponent_is_exact_or_refused(exponent):
    raw = np.random.default_rng(exponent).integers(0, 256, (16, 17), dtype=np.uint8)
    raw[:, 0] = exponent
    raw[0, 1:] = np.arange(16, dtype=np.uint8) * 17  # all values, twice
    if exponent <= LARGEST_EXPONENT:
        check("MXFP4", raw)
        return
    format_ = formats.exact_for("MXFP4")
    with pytest.raises(CheckpointError, match="16 of 16 weights are not finite"):
        format_.pack_exact("MXFP4", torch.from_numpy(raw).view(-1), 16, 32)


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
    with pytest.raises(UnsupportedFormat, match=f"{name} cannot hold IQ2_XS"):
        format_.pack_exact("IQ2_XS", torch.zeros(74, dtype=torch.uint8), 1, 256)

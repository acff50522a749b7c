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
    "IQ1_S": (256, 50, (0,)),
    "IQ1_M": (256, 56, ()),  # a float16 in four parts
    "IQ2_XXS": (256, 66, (0,)),
    "IQ2_XS": (256, 74, (0,)),
    "IQ2_S": (256, 82, (0,)),
    "IQ3_XXS": (256, 98, (0,)),
    "IQ3_S": (256, 110, (0,)),
    "TQ1_0": (256, 54, (52,)),
    "TQ2_0": (256, 66, (64,)),
    "NVFP4": (64, 36, ()),
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
    if source_type == "IQ1_M":
        raw[:, :, 55] &= 0xBF  # below the exponent of infinity
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
    if source_type == "IQ1_M":
        keep[55] = True
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


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_infinite_and_nan_scales_in_four_parts_are_refused(bits):
    raw = blocks("IQ1_M", 16, 1, np.random.default_rng(0))
    for part in range(4):
        raw[3, 49 + 2 * part] = (raw[3, 49 + 2 * part] & 15) | (bits >> (4 * part) & 15) << 4
    with pytest.raises(CheckpointError, match="IQ1_M scale: 1 of 16 weights are not finite"):
        formats.exact_for("IQ1_M").pack_exact("IQ1_M", torch.from_numpy(raw).view(-1), 16, 256)


@pytest.mark.parametrize("scale", range(256))
def test_every_small_float_scale_is_exact(scale):
    raw = np.random.default_rng(scale).integers(0, 256, (16, 36), dtype=np.uint8)
    raw[:, :4] = scale
    raw[0, 4:] = np.arange(32, dtype=np.uint8) % 16 * 17
    check("NVFP4", raw)


@pytest.mark.parametrize("source_type", ["TQ1_0", "TQ2_0"])
def test_every_byte_of_ternary_codes(source_type):
    nbytes = BLOCKS[source_type][1]
    raw = np.resize(np.arange(256, dtype=np.uint8), (256, nbytes))
    raw += np.arange(256, dtype=np.uint8)[:, None]
    raw[:, -2:] = np.array([1], dtype=np.float16).view(np.uint8)
    check(source_type, raw)


@pytest.mark.parametrize(("source_type", "points"), [("IQ2_XXS", 256), ("IQ3_XXS", 256),
                         ("IQ2_XS", 512), ("IQ3_S", 512), ("IQ2_S", 1024), ("IQ1_S", 2048),
                         ("IQ1_M", 2048)])  # fmt: skip
def test_every_point_of_a_grid(source_type, points):
    raw = blocks(source_type, points, 1, np.random.default_rng(points))
    number = np.arange(points)
    low, high = (number % 256).astype(np.uint8)[:, None], number // 256
    if source_type == "IQ2_XXS":
        raw.reshape(points, -1)[:, [2 + 8 * b + i for b in range(8) for i in range(4)]] = low
    elif source_type == "IQ2_XS":
        words = number.astype(np.uint16) | (number * 37 % 128 << 9).astype(np.uint16)
        raw[:, 2:66] = np.repeat(words[:, None], 32, axis=1).view(np.uint8)
    else:
        numbers = {"IQ1_M": (0, 32), "IQ1_S": (2, 34), "IQ2_S": (2, 34)}.get(source_type, (2, 66))
        raw[:, slice(*numbers)] = low
    if source_type == "IQ3_S":
        raw[:, 66:74] = (high * 255).astype(np.uint8)[:, None]
    if source_type == "IQ2_S":
        raw[:, 66:74] = (high * 85).astype(np.uint8)[:, None]
    if source_type == "IQ1_S":
        words = (high * 0o1111 | (number * 29 % 16) << 12).astype(np.uint16)
        raw[:, 34:50] = np.repeat(words[:, None], 8, axis=1).view(np.uint8)
    if source_type == "IQ1_M":
        raw[:, 32:48] = (high * 17 | (number % 4 * 0x58 & 0x88)).astype(np.uint8)[:, None]
    check(source_type, raw)


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
    with pytest.raises(UnsupportedFormat, match=f"{name} cannot hold Q1_0"):
        format_.pack_exact("Q1_0", torch.zeros(18, dtype=torch.uint8), 1, 128)


@pytest.mark.parametrize("name", [n for n in formats.names() if not formats.get(n).quantizes])
def test_formats_that_only_hold_refuse_floats_by_name(name):
    with pytest.raises(UnsupportedFormat, match=f"{name} cannot hold .*not quantized to it"):
        formats.get(name).pack(torch.zeros(16, 256))

"""The bytes of every format lie where the layout table says, for any bytes and any shape."""

import numpy as np
import pytest
import slow_layout
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro import formats
from moestro.core.errors import CheckpointError, UnsupportedFormat
from moestro.formats.base import PackedWeight

NAMES = formats.names()
#: those that weights are quantized to
QUANTIZING = [name for name in NAMES if formats.get(name).quantizes]
#: formats in which padding beside weights need not decode to zero: nothing reads it
FREE_PADDING = ["int4m-g32", "int5m-g32", "k2", "k4", "k5", "lut4nl-g32", "k4nl"]


def random_bytes(name: str, rows: int, cols: int, seed: int) -> torch.Tensor:
    """Random packed bytes in which every float16 (or float) is finite."""
    rng = np.random.default_rng(seed)
    group, nbytes = slow_layout.tile_shape(name, cols)
    tiles = -(-rows // 16) * -(-cols // group)
    data = rng.integers(0, 256, (tiles, nbytes), dtype=np.uint8)
    kind = name.partition("-")[0]
    if kind in ("f32", "f16", "bf16"):
        dtype = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[kind]
        values = rng.standard_normal((tiles, 512))
        if kind == "bf16":
            data = (values.astype(np.float32).view(np.uint32) >> 16).astype(dtype).view(np.uint8)
        else:
            data = values.astype(dtype).view(np.uint8)
    elif kind == "nvfp4s":
        values = rng.standard_normal((tiles, 16)).astype(np.float32)
        data[(data & 0x7F) == 0x7F] = 0x7E
        data[:, :64] = values.view(np.uint8)
    elif kind == "fp8":
        values = rng.standard_normal((tiles, 16)).astype(np.float32)
        data[(data & 0x7F) == 0x7F] = 0x7E  # 0x7f and 0xff are NaN
        data[:, :64] = values.view(np.uint8)
    else:
        halves = {"int4m": 2, "int5m": 2, "k2": 2, "k4": 2, "k5": 2, "mxfp4": 0, "nvfp4": 0}
        count = halves.get(kind, 1)
        values = rng.standard_normal((tiles, count * 16)).astype(np.float16)
        data[:, : 32 * count] = values.view(np.uint8)
        if kind == "int4z":
            data[:, 32:48] &= 15
        if kind in ("k4", "k5"):
            data[:, 64:320] &= 63
        if kind == "mxfp4":
            data[:, :16] %= 253  # beyond, 12 * 2^(e - 128) exceeds float32
    return torch.from_numpy(np.ascontiguousarray(data)).view(-1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "cols"), [(16, 32), (17, 260), (5, 31)])
def test_decode_of_random_bytes_equals_the_layout_table(name, rows, cols):
    data = random_bytes(name, rows, cols, seed=rows * cols)
    format_ = formats.get(name)
    assert format_.nbytes(rows, cols) == data.numel()
    want = slow_layout.decode(name, data.numpy().tobytes(), rows, cols)
    got = format_.unpack(data, rows, cols)
    # Products are exact in float32; formats with a minimum round once, in the addition.
    assert np.array_equal(got.numpy(), want.astype(np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_a_large_matrix_decodes_the_same_in_any_chunking(name):
    """Work is split by rows, so a block of 16 rows means the same alone and within a matrix."""
    format_ = formats.get(name)
    rows, cols = 1040, 256
    data = random_bytes(name, rows, cols, seed=1)
    whole = format_.unpack(data, rows, cols)
    size = format_.nbytes(16, cols)
    for block in (0, 31, 32, 63, 64):
        alone = format_.unpack(data[block * size : (block + 1) * size], 16, cols)
        assert torch.equal(alone, whole[block * 16 : block * 16 + 16])


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(QUANTIZING),
    rows=st.integers(1, 40),
    cols=st.integers(1, 300),
    seed=st.integers(0, 9),
)
def test_packed_bytes_decode_the_same_by_table(name, rows, cols, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator)
    format_ = formats.get(name)
    data = format_.pack(weight)
    assert data.dtype == torch.uint8 and data.numel() == format_.nbytes(rows, cols)
    decoded = format_.unpack(data, rows, cols)
    some = sorted({0, rows // 2, rows - 1})
    table = slow_layout.decode(name, data.numpy().tobytes(), rows, cols)
    assert np.array_equal(decoded[some].numpy(), table[some].astype(np.float32))


@pytest.mark.parametrize("name", QUANTIZING)
@pytest.mark.parametrize(("rows", "cols"), [(3, 5), (16, 40), (33, 257)])
def test_padding_rows_decode_to_zero(name, rows, cols):
    format_ = formats.get(name)
    data = format_.pack(torch.randn(rows, cols) + 3)
    padded = format_.unpack(data, -(-rows // 16) * 16, cols)
    assert bool((padded[rows:] == 0).all())


@pytest.mark.parametrize(
    "name", [n for n in QUANTIZING if n not in FREE_PADDING and not n.startswith("int4m")]
)
def test_padding_columns_decode_to_zero(name):
    format_ = formats.get(name)
    data = format_.pack(torch.randn(16, 37) + 3)
    # For row formats 37 columns and 64 columns have the same layout too.
    padded = format_.unpack(data, 16, format_.padded_cols(37))
    assert bool((padded[:, 37:] == 0).all())


@pytest.mark.parametrize("name", FREE_PADDING)
def test_whole_groups_of_padding_decode_to_zero(name):
    format_ = formats.get(name)
    cols = 64
    padded_cols = format_.padded_cols(cols)
    data = format_.pack(torch.randn(16, cols) + 3)
    assert bool((format_.unpack(data, 16, padded_cols)[:, cols:] == 0).all())


def test_sizes_and_bits_per_weight():
    bits = {name: formats.get(name).bits_per_weight(2048) for name in NAMES}
    assert bits["int4-g32"] == 4.5 and bits["int8-g32"] == 8.5 and bits["int4-g128"] == 4.125
    assert bits["k4"] == 4.625 and bits["k6"] == 6.5625 and bits["bf16"] == 16
    assert bits["k2"] == 2.625 and bits["k3"] == 3.4375 and bits["k5"] == 5.625
    assert bits["lut4nl-g32"] == 4.5 and bits["mxfp4"] == 4.25 and bits["k4nl"] == 4.3125
    assert bits["nvfp4s"] == 4.75 and bits["int8z-g128"] == 8.1875
    assert bits["int5-g32"] == 5.5 and bits["int5m-g32"] == 6
    assert bits["iq1s"] == 1.59375 and bits["iq1m"] == 1.8125 and bits["ternary"] == 2.0625
    assert bits["iq2xxs"] == 2.1875 and bits["iq2xs"] == 2.4375 and bits["iq2s"] == 2.5625
    assert bits["iq3xxs"] == 3.1875 and bits["iq3s"] == 3.4375 and bits["nvfp4"] == 4.5
    assert bits["int4-row"] == 4 + 16 / 2048
    assert formats.get("int4-row").nbytes(17, 40) == 2 * (32 + 2 * 256)


def test_unknown_names_and_types_say_what_is_possible():
    with pytest.raises(UnsupportedFormat, match=r"int4-g32"):
        formats.get("int7-g32")
    with pytest.raises(UnsupportedFormat, match=r"Q1_0.*Q4_K"):
        formats.exact_for("Q1_0")


def test_the_default_and_exact_formats_are_registered():
    assert formats.DEFAULT in formats.names()
    exact = {"F32": "f32", "F16": "f16", "BF16": "bf16", "Q8_0": "int8-g32", "Q4_0": "int4-g32"}
    exact |= {"Q4_1": "int4m-g32", "Q4_K": "k4", "Q6_K": "k6"}
    exact |= {"Q5_0": "int5-g32", "Q5_1": "int5m-g32", "Q2_K": "k2", "Q3_K": "k3", "Q5_K": "k5"}
    exact |= {"IQ4_NL": "lut4nl-g32", "IQ4_XS": "k4nl", "MXFP4": "mxfp4"}
    exact |= {"IQ1_S": "iq1s", "IQ1_M": "iq1m", "IQ2_XXS": "iq2xxs", "IQ2_XS": "iq2xs"}
    exact |= {"IQ2_S": "iq2s", "IQ3_XXS": "iq3xxs", "IQ3_S": "iq3s", "NVFP4": "nvfp4"}
    exact |= {"TQ1_0": "ternary", "TQ2_0": "ternary"}
    assert {source: formats.exact_for(source).name for source in exact} == exact


def test_wrong_byte_counts_are_refused():
    format_ = formats.get("int4-g32")
    with pytest.raises(CheckpointError, match="288 bytes, got 287"):
        format_.unpack(torch.zeros(287, dtype=torch.uint8), 16, 32)
    with pytest.raises(CheckpointError, match="needs 288 bytes"):
        PackedWeight(format=format_, rows=16, cols=32, data=torch.zeros(1, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match="18 bytes, got 17"):
        format_.pack_exact("Q4_0", torch.zeros(17, dtype=torch.uint8), 1, 32)

"""The native packers give the bytes of the Python reference, on every instruction set and team."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro import formats, native
from moestro.core.errors import CheckpointError, InvalidRequest, UnsupportedFormat
from moestro.native import core

NAMES = [name for name in formats.names() if core.can_quantize(name)]
INTEGER = [name for name in NAMES if not formats.get(name).is_float]
# source type -> (channels, bytes, offsets of float16 fields) of a block
BLOCKS = {
    "Q8_0": (32, 34, (0,)),
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q4_K": (256, 144, (0, 2)),
    "Q6_K": (256, 210, (208,)),
    "IQ1_S": (256, 50, (0,)),
    "IQ1_M": (256, 56, ()),
    "IQ2_XXS": (256, 66, (0,)),
    "IQ2_XS": (256, 74, (0,)),
    "IQ2_S": (256, 82, (0,)),
    "IQ3_XXS": (256, 98, (0,)),
    "IQ3_S": (256, 110, (0,)),
}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def blocks(source_type: str, rows: int, cols: int, seed: int) -> torch.Tensor:
    """Random checkpoint bytes with finite float16 fields."""
    rng = np.random.default_rng(seed)
    if source_type in FLOATS:
        values = torch.from_numpy(rng.standard_normal((rows, cols), dtype=np.float32))
        return values.to(FLOATS[source_type]).view(torch.uint8).reshape(-1)
    channels, nbytes, fields = BLOCKS[source_type]
    raw = rng.integers(0, 256, (rows, -(-cols // channels), nbytes), dtype=np.uint8)
    for at in fields:
        bits = rng.integers(0, 0x7C00, raw.shape[:2], dtype=np.uint16)
        bits |= rng.integers(0, 2, raw.shape[:2], dtype=np.uint16) << 15
        raw[:, :, at : at + 2] = bits[:, :, None].view(np.uint8)
    if source_type == "IQ1_M":
        raw[:, :, 55] &= 0xBF  # its float16 is in four parts
    return torch.from_numpy(raw).view(-1)


def weights(kind: str, rows: int, cols: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * 0.03
    if kind == "outliers":
        x = torch.where(torch.rand(rows, cols, generator=generator) < 0.02, x * 20, x)
    elif kind == "shifted":
        x = x + 0.05
    elif kind == "grid":
        x = torch.randint(-7, 8, (rows, cols), generator=generator) * 0.25
    elif kind == "tiny":
        x = x * 10.0 ** torch.randint(-8, 1, (rows, 1), generator=generator)
    elif kind == "sparse":
        x = torch.where(torch.rand(rows, cols, generator=generator) < 0.9, torch.zeros(()), x)
    elif kind == "large":
        x = x / 0.15 * 60000
    elif kind == "bfloat16":
        x = x.to(torch.bfloat16).float()
    return x


KINDS = ("normal", "outliers", "shifted", "grid", "tiny", "sparse", "large", "bfloat16")


@pytest.mark.parametrize("source_type", [*FLOATS, *BLOCKS])
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 50), cols=st.integers(1, 1100), seed=st.integers(0, 2**32 - 1))
def test_repacked_bytes_are_those_of_the_reference(source_type, rows, cols, seed):
    format_ = formats.exact_for(source_type)
    assert core.can_repack(format_.name, source_type)
    raw = blocks(source_type, rows, cols, seed)
    want = format_.pack_exact_reference(source_type, raw, rows, cols)
    assert torch.equal(format_.pack_exact(source_type, raw, rows, cols), want)


@pytest.mark.parametrize("source_type", [*FLOATS, *BLOCKS])
def test_repacking_does_not_depend_on_threads(source_type):
    format_ = formats.exact_for(source_type)
    raw = blocks(source_type, 70, 6400, 1)
    packed = []
    for threads in (1, 2, 5):
        native.set_threads(threads)
        packed.append(format_.pack_exact(source_type, raw, 70, 6400))
    out = torch.full_like(packed[0], 255)
    alone = format_.pack_exact(source_type, raw, 70, 6400, out=out, alone=True)
    assert alone is out
    assert all(torch.equal(alone, other) for other in packed)


@pytest.mark.parametrize("source_type", FLOATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_floats_that_are_not_finite_are_not_repacked(source_type, bad):
    values = torch.zeros(18, 45, dtype=FLOATS[source_type])
    values[17, 44] = values[0, 0] = bad
    raw = values.view(torch.uint8).reshape(-1)
    with pytest.raises(CheckpointError, match="2 of 810 weights are not finite"):
        formats.exact_for(source_type).pack_exact(source_type, raw, 18, 45)
    with pytest.raises(CheckpointError, match="2 of 810 weights are not finite"):
        formats.exact_for(source_type).pack_exact(source_type, raw, 18, 45, alone=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_quantized_bytes_are_those_of_the_reference(name, kind):
    x = weights(kind, 21, 600, 7)
    format_ = formats.get(name)
    if kind == "large" and (name == "f16" or name.startswith("int4m")):
        x = x / 8  # their values, not only their scales, are float16
    assert torch.equal(format_.pack(x), format_.pack_reference(x))


@pytest.mark.parametrize("name", INTEGER)
@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 35),
    cols=st.integers(1, 530),
    kind=st.sampled_from(KINDS[:6]),
    seed=st.integers(0, 2**32 - 1),
)
def test_odd_shapes_and_importance_give_the_bytes_of_the_reference(name, rows, cols, kind, seed):
    x = weights(kind, rows, cols, seed)
    importance = torch.rand(cols, generator=torch.Generator().manual_seed(seed)) ** 4
    format_ = formats.get(name)
    for weight in (None, importance):
        want = format_.pack_reference(x, importance=weight)
        assert torch.equal(format_.pack(x, importance=weight), want)


@pytest.mark.parametrize("name", INTEGER)
@pytest.mark.parametrize("cols", [1, 10, 32, 33])
def test_rows_of_about_one_block_give_the_bytes_of_the_reference(name, cols):
    x = weights("outliers", 40, cols, 11)
    format_ = formats.get(name)
    assert torch.equal(format_.pack(x), format_.pack_reference(x))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_read_as_they_are(name, dtype):
    x = weights("normal", 33, 300, 3).to(dtype)
    format_ = formats.get(name)
    assert torch.equal(format_.pack(x), format_.pack_reference(x.float()))


@pytest.mark.parametrize("name", NAMES)
def test_quantizing_does_not_depend_on_instruction_set_or_threads(name):
    format_ = formats.get(name)
    x = weights("outliers", 50, 2600, 5)
    importance = torch.rand(2600, generator=torch.Generator().manual_seed(2))
    runs = []
    for isa in native.supported_isas():
        for threads in (1, 3):
            native.set_isa(isa)
            native.set_threads(threads)
            runs.append(format_.pack_measured(x, importance=importance))
    packed, error, norm = runs[0]
    for other in runs[1:]:
        assert torch.equal(other[0], packed) and other[1:] == (error, norm)


@pytest.mark.parametrize("cols", [64, 600])
@pytest.mark.parametrize("name", NAMES)
def test_the_measured_error_is_that_of_the_decoded_weights(name, cols):
    x = weights("shifted", 19, cols, 6)
    format_ = formats.get(name)
    packed, error, norm = format_.pack_measured(x)
    residual = format_.unpack(packed, 19, cols).double() - x.double()
    assert error == pytest.approx(float(residual.square().sum()), rel=1e-4, abs=1e-12)
    assert norm == pytest.approx(float(x.double().square().sum()), rel=1e-5)


def test_a_row_wider_than_a_workers_scratch():
    x = weights("normal", 3, 20000, 8)
    format_ = formats.get("int4-row")
    assert torch.equal(format_.pack(x), format_.pack_reference(x))


@pytest.mark.parametrize("name", NAMES)
def test_all_weights_that_are_not_finite_are_counted(name):
    x = weights("normal", 40, 700, 9)
    x[0, 0] = x[39, 699] = torch.nan
    x[20, 350] = torch.inf
    with pytest.raises(CheckpointError, match=r"^3 of 28000 weights are not finite"):
        formats.get(name).pack(x)


def test_sizes_and_names_are_checked_before_any_memory_is_touched():
    x, raw = torch.zeros(16, 32), torch.zeros(288, dtype=torch.uint8)
    with pytest.raises(InvalidRequest, match="packed bytes is 287, expected 288"):
        core.quantize("int4-g32", x, None, raw[:287])
    with pytest.raises(InvalidRequest, match="importance is 31, expected 32"):
        core.quantize("int4-g32", x, torch.ones(31), raw)
    with pytest.raises(InvalidRequest, match="source bytes is 287, expected 288"):
        core.repack("int4-g32", "Q4_0", raw[:287], 16, 32, raw)
    with pytest.raises(UnsupportedFormat, match="no shuffle of Q8_0 weights into int4 tiles"):
        core.repack("int4-g32", "Q8_0", raw, 16, 32, raw)
    with pytest.raises(UnsupportedFormat, match="float32, float16 or bfloat16"):
        core.quantize("int4-g32", x.double(), None, raw)
    assert not core.can_quantize("int5-g32") and not core.can_repack("int4-g64", "Q4_0")
    assert not core.can_repack("int4-row", "Q4_0")

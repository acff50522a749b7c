"""Packing from floats: error against known methods, exactness on grids, and hostile values."""

import ggml_like
import numpy as np
import pytest
import slow_layout
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro import formats
from moestro.core.errors import CheckpointError

NAMES = [name for name in formats.names() if formats.get(name).quantizes]
NONLINEAR = np.array(slow_layout.NONLINEAR)
E2M1 = np.array(slow_layout.E2M1)
INTEGER = [n for n in NAMES if not formats.get(n).is_float]
ONE_LEVEL = [n for n in INTEGER if n.startswith("int") and not n.startswith("int8z")]
# Error relative to the weights that formats of few bits may have on normal values.
NOISE = {"k2": 0.12, "k3": 0.04}


def roundtrip(name, weight, importance=None):
    format_ = formats.get(name)
    return format_.unpack(format_.pack(weight, importance=importance), *weight.shape)


def weights(kind: str, rows: int = 32, cols: int = 512) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, cols, generator=generator) * 0.03
    if kind == "outliers":
        mask = torch.rand(rows, cols, generator=generator) < 0.01
        x = torch.where(mask, x * 12, x)
    if kind == "shifted":
        x = x + 0.05
    return x


def mse(x, y):
    return float((x.double() - torch.as_tensor(y).double()).square().mean())


@pytest.mark.parametrize("kind", ["normal", "outliers", "shifted"])
def test_error_is_below_simple_rounding(kind):
    x = weights(kind)
    plain = x.numpy()
    yardsticks = {
        "int4-g32": [ggml_like.absmax(plain, 32, 7), ggml_like.signed_max(plain, 32, -8)],
        "int4-g64": [ggml_like.signed_max(plain, 64, -8)],
        "int4-g128": [ggml_like.signed_max(plain, 128, -8)],
        "int4-row": [ggml_like.signed_max(plain, 512, -8)],
        "int8-g32": [ggml_like.absmax(plain, 32, 127)],
        "int8-g128": [ggml_like.absmax(plain, 128, 127)],
        "int8-row": [ggml_like.absmax(plain, 512, 127)],
        "int8z-g32": [ggml_like.absmax(plain, 32, 127)],
        "int4z-g32": [ggml_like.signed_max(plain, 32, -8)],
        "int4m-g32": [ggml_like.minmax(plain, 32)],
        "int4m-g128": [ggml_like.minmax(plain, 128)],
        "int5-g32": [ggml_like.signed_max(plain, 32, -16)],
        "int5m-g32": [ggml_like.minmax(plain, 32, 31)],
        "lut4nl-g32": [ggml_like.table_search(plain, NONLINEAR)],
        "k4nl": [ggml_like.table_search(plain, NONLINEAR, two_level=True)],
        "mxfp4": [ggml_like.shared_exponent(plain, E2M1)],
        "nvfp4s": [ggml_like.shared_exponent(plain, E2M1), ggml_like.two_level_floats(plain, E2M1)],
    }
    for name, others in yardsticks.items():
        ours = mse(x, roundtrip(name, x))
        for other in others:
            assert ours < mse(x, other), name


@pytest.mark.parametrize("kind", ["normal", "outliers", "shifted"])
def test_two_level_formats_are_no_worse_than_the_search_they_are_named_after(kind):
    x = weights(kind)
    plain, ones = x.numpy(), np.ones(x.shape)
    rms = np.sqrt((plain.reshape(-1, 32) ** 2).mean(1, keepdims=True))
    usual = (rms + np.abs(plain.reshape(-1, 32))).reshape(x.shape)
    five = {"hi": 31, "first": 30.5, "steps": 16}
    two = {"hi": 3, "first": 2.5, "steps": 16, "sub": 16, "limit": 15}
    for w in (ones, usual):
        assert mse(x, roundtrip("k5", x)) <= mse(x, ggml_like.two_level_affine(plain, w, **five))
    for w in (ones, np.abs(plain)):
        assert mse(x, roundtrip("k2", x)) <= mse(x, ggml_like.two_level_affine(plain, w, **two))
    assert mse(x, roundtrip("k3", x)) <= mse(x, ggml_like.two_level_three_bits(plain))
    assert mse(x, roundtrip("k4", x)) <= mse(x, ggml_like.two_level_affine(plain, ones))
    assert mse(x, roundtrip("k4", x)) <= mse(x, ggml_like.two_level_affine(plain, usual))
    assert mse(x, roundtrip("k6", x)) <= mse(x, ggml_like.two_level_symmetric(plain, ones))
    assert mse(x, roundtrip("k6", x)) <= mse(x, ggml_like.two_level_symmetric(plain, plain**2))


def test_finer_formats_have_smaller_errors():
    x = weights("normal")
    names = ["k2", "k3", "int4-row", "int4-g128", "int4-g64", "int4-g32", "int4m-g32", "int5-g32"]
    errors = [mse(x, roundtrip(n, x)) for n in (*names, "k6", "int8-g32")]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("name", INTEGER)
def test_importance_lowers_the_weighted_error(name):
    x = weights("normal")
    importance = torch.rand(512, generator=torch.Generator().manual_seed(0)) ** 6 + 1e-3

    def weighted(y):
        return float(((x - y).square() * importance).mean())

    assert weighted(roundtrip(name, x, importance)) < weighted(roundtrip(name, x))


@pytest.mark.parametrize("name", INTEGER)
def test_importance_that_never_saw_a_channel_does_not_erase_it(name):
    x = weights("normal", 16, 512)
    importance = torch.zeros(512)
    importance[:32] = 1
    for some in (importance, torch.zeros(512)):
        error = mse(x[:, 32:], roundtrip(name, x, some)[:, 32:])
        assert error < 2 * mse(x, roundtrip(name, x))


def test_bad_importance_is_refused():
    x = weights("normal", 16, 64)
    format_ = formats.get("int4-g32")
    with pytest.raises(CheckpointError, match=r"shape \[63\].*64 columns"):
        format_.pack(x, importance=torch.ones(63))
    with pytest.raises(CheckpointError, match="negative"):
        format_.pack(x, importance=-torch.ones(64))
    with pytest.raises(CheckpointError, match="importance: 1 of 64"):
        format_.pack(x, importance=torch.ones(64).index_fill(0, torch.tensor([2]), torch.nan))


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(ONE_LEVEL),
    rows=st.integers(1, 20),
    cols=st.integers(1, 140),
    spread=st.integers(0, 8),
    seed=st.integers(0, 999),
)
def test_weights_on_a_grid_come_back_exactly(name, rows, cols, spread, seed):
    """What such a format can represent (a model that was quantized and dequantized) is kept."""
    generator = torch.Generator().manual_seed(seed)
    if name.startswith("int8"):
        # An 8-bit grid is found by its full range only: put the end of it into every group.
        codes = torch.randint(-127, 128, (rows, cols), generator=generator)
        group = formats.get(name).group(cols)
        codes[:, ::group] = 127
    else:
        codes = torch.randint(-spread, min(spread, 7) + 1, (rows, cols), generator=generator)
    largest = 31 if name.startswith("int5m") else 15
    scale = (torch.rand(rows, 1, generator=generator) + 0.01).half().float()
    x = codes * scale
    if name.startswith(("int4m", "int5m")):
        # The minimum itself is a float16, and every group reaches it.
        codes = codes + spread
        codes[:, :: formats.get(name).group(cols)] = 0
        low = torch.rand(rows, 1, generator=generator).half().float()
        x = codes.clamp(max=largest) * scale - low
    assert torch.equal(roundtrip(name, x), x)


@pytest.mark.parametrize("name", ["int4-g32", "int4-g128", "int4z-g32", "int4m-g32",
                                  "int5-g32", "int5m-g32", "lut4nl-g32", "mxfp4"])  # fmt: skip
def test_packing_again_changes_nothing(name):
    once = roundtrip(name, weights("normal"))
    assert torch.equal(roundtrip(name, once), once)


@pytest.mark.parametrize("name", NAMES)
def test_zero_rows_stay_zero(name):
    x = weights("normal", 20, 256)
    x[3] = 0
    x[19] = 0
    y = roundtrip(name, x)
    assert bool((y[3] == 0).all()) and bool((y[19] == 0).all())
    assert float(y[4].abs().max()) > 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-9, 3e-8, 1e-6, 1e-4])
def test_tiny_weights_are_kept_as_well_as_float16_scales_allow(name, magnitude):
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(1)) * magnitude
    y = roundtrip(name, x)
    assert bool(torch.isfinite(y).all())
    assert mse(x, y) <= mse(x, torch.zeros_like(x)) + 1e-30
    if magnitude >= 1e-4:
        assert mse(x, y) < NOISE.get(name, 0.02) * mse(x, torch.zeros_like(x))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_weights_are_refused(name, bad):
    x = weights("normal", 17, 64)
    x[16, 63] = bad
    with pytest.raises(CheckpointError, match="1 of 1088 weights are not finite"):
        formats.get(name).pack(x)


@pytest.mark.parametrize(
    "name", [n for n in NAMES if not n.startswith(("f32", "bf16", "fp8", "mxfp4", "nvfp4s"))]
)
@pytest.mark.parametrize("huge", [1e10, 3e38])
def test_scales_beyond_float16_are_refused(name, huge):
    x = weights("normal", 16, 256)
    x[7, 100] = huge
    with pytest.raises(CheckpointError, match=r"(need a scale beyond float16|exceed the range)"):
        formats.get(name).pack(x)


def test_bfloat16_refuses_what_would_round_to_infinity():
    with pytest.raises(CheckpointError, match="exceed the range of bf16"):
        formats.get("bf16").pack(torch.full((1, 1), 3.4028e38))


@pytest.mark.parametrize("name", INTEGER)
def test_the_largest_scales_still_work(name):
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(2))
    x = x / x.abs().max() * 60000 * (1 if name in ("int4m-g32", "int5m-g32") else 7)
    if name.startswith(("int4m", "int5m")):
        x = x.clamp(-60000, 60000)  # its minimum is a float16 itself
    y = roundtrip(name, x)
    assert bool(torch.isfinite(y).all()) and (
        mse(x, y) < NOISE.get(name, 0.02) * float(x.square().mean())
    )


@pytest.mark.parametrize("name", INTEGER)
@settings(max_examples=6, deadline=None)
@given(rows=st.integers(1, 35), cols=st.integers(1, 530), seed=st.integers(0, 99))
def test_odd_shapes(name, rows, cols, seed):
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    y = roundtrip(name, x)
    bound = 0.02 if formats.get(name).bits_per_weight(cols) < 6 or "4" in name else 0.002
    bound = NOISE.get(name, bound)
    assert y.shape == x.shape and mse(x, y) < bound * max(1.0, float(x.square().mean()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_dtype_and_stride_is_taken(dtype):
    x = weights("normal", 64, 64).to(dtype)
    format_ = formats.get("int4-g32")
    assert torch.equal(format_.pack(x), format_.pack(x.float()))
    assert torch.equal(format_.pack(x.T), format_.pack(x.T.contiguous()))


def test_integers_and_vectors_are_refused():
    with pytest.raises(CheckpointError, match=r"float matrices"):
        formats.get("int4-g32").pack(torch.zeros(4, 4, dtype=torch.int32))
    with pytest.raises(CheckpointError, match=r"float matrices"):
        formats.get("int4-g32").pack(torch.zeros(4))


@pytest.mark.parametrize("table", ["lut4nl-g32", "mxfp4"])
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 20), cols=st.integers(1, 140), seed=st.integers(0, 999))
def test_weights_on_a_table_come_back_exactly(table, rows, cols, seed):
    """A model that was quantized to such values and dequantized is kept."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.from_numpy(NONLINEAR if table == "lut4nl-g32" else E2M1)
    codes = values[torch.randint(0, 16, (rows, cols), generator=generator)]
    codes[:, ::32] = -127 if table == "lut4nl-g32" else -12  # the end of the range in every group
    if table == "mxfp4":
        exponents = torch.randint(-90, 90, (rows, 1), generator=generator).numpy()
        scale = torch.from_numpy(np.ldexp(np.float32(1), exponents))
    else:
        scale = (torch.rand(rows, 1, generator=generator) + 0.01).half().float()
    assert torch.equal(roundtrip(table, codes * scale), codes * scale)


def test_shared_exponents_reach_far():
    x = weights("normal", 16, 64)
    for exponent in (-80, -60, 0, 90, 120):
        factor = 2.0**exponent
        assert torch.equal(roundtrip("mxfp4", x * factor), roundtrip("mxfp4", x) * factor)
    huge = torch.full((16, 32), torch.finfo(torch.float32).max)
    assert bool(torch.isfinite(roundtrip("mxfp4", huge)).all())

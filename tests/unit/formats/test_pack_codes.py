"""Codes, scales and zero points that are packed as they are, against the layout in slow Python."""

from __future__ import annotations

import numpy as np
import pytest
import slow_layout
import torch
from torch import Tensor

from moestro import formats
from moestro.core.errors import CheckpointError, UnsupportedFormat

HOLDS = [n for n in formats.names() if n.startswith(("int4-", "int4z-", "int8-", "int8z-"))]
MIDDLES = {"int4": 8, "int8": 128}


def parts(name: str, rows: int, cols: int) -> tuple[Tensor, Tensor, Tensor | None]:
    rng = np.random.default_rng(rows * cols)
    format_, bits = formats.get(name), int(name[3])
    groups = format_.padded_cols(cols) // format_.group(cols)
    codes = rng.integers(0, 1 << bits, (rows, cols), dtype=np.uint8)
    codes.flat[0], codes.flat[-1] = 0, (1 << bits) - 1
    scales = rng.normal(size=(rows, groups)).astype(np.float16).astype(np.float32)
    zeros = None
    if name[4] == "z":
        zeros = rng.integers(0, 1 << bits, (rows, groups), dtype=np.uint8)
        zeros.flat[0], zeros.flat[-1] = 0, (1 << bits) - 1
    tensors = [None if a is None else torch.from_numpy(a) for a in (codes, scales, zeros)]
    assert tensors[0] is not None and tensors[1] is not None
    return tensors[0], tensors[1], tensors[2]


@pytest.mark.parametrize(("rows", "cols"), [(16, 128), (33, 96), (5, 70), (1, 1), (48, 384)])
@pytest.mark.parametrize("name", HOLDS)
def test_values_and_padding(name: str, rows: int, cols: int):
    codes, scales, zeros = parts(name, rows, cols)
    format_ = formats.get(name)
    packed = format_.pack_codes(codes, scales, zeros)
    padded = format_.padded_cols(cols)
    all_rows = -(-rows // 16) * 16
    got = slow_layout.decode(name, packed.numpy().tobytes(), all_rows, padded)
    group, middle = format_.group(cols), MIDDLES.get(name.partition("-")[0], 0)
    want = np.zeros((all_rows, padded))
    for n in range(rows):
        for k in range(cols):
            zero = middle if zeros is None else int(zeros[n, k // group])
            want[n, k] = float(scales[n, k // group]) * (int(codes[n, k]) - zero)
    assert np.array_equal(np.asarray(got, dtype=np.float64), want)
    assert np.array_equal(format_.unpack(packed, rows, cols).numpy(), want[:rows, :cols])


def test_4_bit_floats_with_powers_of_two():
    rng = np.random.default_rng(4)
    codes = torch.from_numpy(rng.integers(0, 16, (33, 70), dtype=np.uint8))
    exponents = rng.integers(-127, 126, (33, 3))
    exponents.flat[:2], exponents.flat[-1] = -127, 125
    scales = torch.from_numpy(np.ldexp(np.float32(1), exponents).astype(np.float32))
    format_ = formats.get("mxfp4")
    got = np.asarray(
        slow_layout.decode("mxfp4", format_.pack_codes(codes, scales).numpy().tobytes(), 48, 96)
    )
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = np.concatenate([numbers, -numbers])[codes.numpy()]
    want = numbers * np.repeat(2.0**exponents, 32, axis=1)[:, :70]
    assert np.array_equal(got[:33, :70], want)
    assert not got[33:].any() and not got[:, 70:].any()
    for bad in (3.0, 0.0, -1.0, 2.0**-128, float("nan"), 2.0**126):
        error = CheckpointError if bad > 100 or bad != bad else UnsupportedFormat
        with pytest.raises(error, match=r"powers of two|not finite"):
            format_.pack_codes(codes, torch.full((33, 3), bad))
    with pytest.raises(UnsupportedFormat, match="has no zero points"):
        format_.pack_codes(codes, scales, torch.zeros(33, 3, dtype=torch.uint8))


def test_4_bit_floats_with_two_levels_of_scales():
    rng = np.random.default_rng(5)
    codes = torch.from_numpy(rng.integers(0, 16, (33, 150), dtype=np.uint8))
    bytes_ = torch.from_numpy(rng.integers(0, 127, (33, 10), dtype=np.uint8))
    scales = bytes_.view(torch.float8_e4m3fn).float()
    factors = torch.from_numpy(rng.uniform(1e-5, 1e-3, 33).astype(np.float32))
    format_ = formats.get("nvfp4s")
    packed = format_.pack_codes(codes, scales, None, factors)
    got = np.asarray(slow_layout.decode("nvfp4s", packed.numpy().tobytes(), 48, 256))
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = np.concatenate([numbers, -numbers])[codes.numpy()]
    steps = (factors[:, None] * scales).numpy().astype(np.float64)
    assert np.array_equal(got[:33, :150], numbers * np.repeat(steps, 16, axis=1)[:, :150])
    assert not got[33:].any() and not got[:, 150:].any()
    with pytest.raises(UnsupportedFormat, match="needs a factor"):
        format_.pack_codes(codes, scales)
    with pytest.raises(UnsupportedFormat, match="are not e4m3 numbers"):
        format_.pack_codes(codes, scales + 0.001, None, factors)
    for bad in (factors[:-1], factors * torch.nan, factors * 1e39):
        with pytest.raises(CheckpointError, match="factors of scales"):
            format_.pack_codes(codes, scales, None, bad)
    with pytest.raises(UnsupportedFormat, match="has one level of scales"):
        formats.get("mxfp4").pack_codes(codes, torch.ones(33, 5), None, factors)


@pytest.mark.parametrize(
    "name",
    [n for n in formats.names() if n not in HOLDS and not n.startswith(("fp8", "mxfp4", "nvfp4s"))],
)
def test_other_formats_hold_no_codes(name: str):
    codes = torch.zeros(16, 256, dtype=torch.uint8)
    groups = formats.get(name).padded_cols(256) // formats.get(name).group(256)
    for zeros in (None, torch.zeros(16, groups, dtype=torch.uint8)):
        with pytest.raises(UnsupportedFormat, match=f"{name} does not hold integer codes"):
            formats.get(name).pack_codes(codes, torch.ones(16, groups), zeros)


@pytest.mark.parametrize(("scale", "count"), [(0.1, 1), (1e-9, 1), (65520.0, 1), (6e-8, 1)])
def test_scales_that_are_not_float16_are_refused(scale: float, count: int):
    codes, scales, _ = parts("int4-g32", 16, 64)
    scales[3, 1] = scale
    with pytest.raises(UnsupportedFormat, match=rf"{count} of 32 scales .*--format int4-g32"):
        formats.get("int4-g32").pack_codes(codes, scales)


def test_subnormal_and_negative_scales_are_kept():
    codes, scales, _ = parts("int4-g32", 16, 64)
    scales[0, 0], scales[1, 0], scales[2, 0] = 2.0**-24, -(2.0**-24) * 1023, 65504.0
    unpacked = formats.get("int4-g32").unpack(
        formats.get("int4-g32").pack_codes(codes, scales), 16, 64
    )
    want = (codes.float() - 8) * scales.repeat_interleave(32, dim=1)
    assert torch.equal(unpacked, want)


def test_what_does_not_fit_together():
    codes, scales, zeros = parts("int4z-g32", 16, 64)
    with_zeros, without = formats.get("int4z-g32"), formats.get("int4-g32")
    bad = scales.clone()
    bad[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="not finite"):
        with_zeros.pack_codes(codes, bad, zeros)
    with pytest.raises(UnsupportedFormat, match="int4z-g32 needs zero points"):
        with_zeros.pack_codes(codes, scales)
    with pytest.raises(UnsupportedFormat, match="int4-g32 has no zero points"):
        without.pack_codes(codes, scales, zeros)
    with pytest.raises(CheckpointError, match="codes and zero points 0 to 15, got 16"):
        without.pack_codes(codes + 1, scales)
    with pytest.raises(CheckpointError, match=r"scales torch.float32 \[16, 2\]"):
        without.pack_codes(codes, scales[:, :1])
    with pytest.raises(CheckpointError, match=r"codes torch\.uint8"):
        without.pack_codes(codes.to(torch.int8), scales)


@pytest.mark.parametrize("name", [n for n in formats.names() if n.startswith("fp8")])
@pytest.mark.parametrize(("rows", "cols"), [(16, 256), (33, 96), (5, 300)])
def test_e4m3_codes(name: str, rows: int, cols: int):
    """Every finite code, with float32 scales that float16 does not hold."""
    rng = np.random.default_rng(rows)
    format_ = formats.get(name)
    groups = format_.padded_cols(cols) // format_.group(cols)
    codes = rng.permutation(rows * cols).astype(np.uint8).reshape(rows, cols)
    codes[(codes & 0x7F) == 0x7F] -= 1
    scales = (rng.normal(size=(rows, groups)) * 1e-3).astype(np.float32)
    scales[0, 0], scales[-1, -1] = 1e-20, 1e20
    packed = format_.pack_codes(torch.from_numpy(codes), torch.from_numpy(scales))
    padded = format_.padded_cols(cols)
    got = slow_layout.decode(name, packed.numpy().tobytes(), -(-rows // 16) * 16, padded)
    want = np.zeros_like(got)
    for n in range(rows):
        for k in range(cols):
            scale = float(scales[n, k // format_.group(cols)])
            want[n, k] = scale * slow_layout.e4m3(int(codes[n, k]))
    assert np.array_equal(got, want)
    unpacked = format_.unpack(packed, rows, cols).numpy()
    assert np.array_equal(unpacked, want[:rows, :cols].astype(np.float32))


def test_e4m3_without_a_value():
    codes, scales = torch.zeros(16, 128, dtype=torch.uint8), torch.ones(16, 1)
    format_ = formats.get("fp8-g128")
    for bad in (0x7F, 0xFF):
        codes[3, 5] = bad
        with pytest.raises(CheckpointError, match="1 of 2048 weights are not finite"):
            format_.pack_codes(codes, scales)
    codes[3, 5] = 0x7E
    for value in (float("nan"), float("inf"), 1e38):
        scales[2] = value
        with pytest.raises(CheckpointError, match="scales are not finite"):
            format_.pack_codes(codes, scales)


def test_a_format_name_is_the_type_of_codes_it_holds():
    for name in formats.names():
        assert formats.exact_for(name) is formats.get(name)

"""Packed linear: every format x every instruction set, bits and values."""

from __future__ import annotations

import packed_cases as cases
import pytest
import torch

from moestro import formats, native
from moestro.core.errors import InvalidRequest, UnsupportedFormat

ISAS = cases.ISAS
#: output channels, input channels: odd edges, one tile, several K-groups
SHAPES = [(37, 600), (16, 32), (1, 1), (50, 257)]


@pytest.mark.parametrize("name", cases.FORMATS)
def test_native_decode_equals_the_reference(name: str) -> None:
    for rows, cols in SHAPES:
        for weight in (
            cases.random_weight(name, rows, cols),
            cases.extreme_weight(name, rows, cols),
        ):
            found = torch.from_numpy(native.core.decode(name, weight.data, rows, cols))
            assert torch.equal(found, weight.unpack())


@pytest.mark.parametrize("name", cases.FORMATS)
def test_same_bits_for_every_isa_thread_count_and_batch(name: str) -> None:
    for rows, cols in SHAPES:
        weight = cases.random_weight(name, rows, cols, seed=rows)
        x = torch.randn(19, cols, generator=torch.Generator().manual_seed(cols))
        for isa in ISAS:
            with cases.running(cases.reference_isa(isa, name), 1):
                expected = cases.linear(weight, x)
            for threads in (1, 2):
                with cases.running(isa, threads):
                    assert torch.equal(cases.linear(weight, x), expected), (isa, threads)
            with cases.running(isa, 1):
                for size in (1, 2, 3, 5, 8):
                    parts = [cases.linear(weight, part) for part in x.split(size)]
                    assert torch.equal(torch.cat(parts), expected), (isa, size)


@pytest.mark.parametrize("name", cases.FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_values_against_float64(name: str, isa: str) -> None:
    for rows, cols in SHAPES:
        weight = cases.random_weight(name, rows, cols)
        x = torch.randn(5, cols, generator=torch.Generator().manual_seed(1))
        exact = cases.multiplied(name, x, isa) @ weight.unpack().double().T
        # one rounding per float step; sums of |terms| bound the growth
        size = cases.multiplied(name, x, isa).abs() @ weight.unpack().double().abs().T
        with cases.running(isa, 1):
            error = (cases.linear(weight, x).double() - exact).abs()
        assert bool((error <= 4e-7 * size.clamp_min(1e-30) * max(1.0, cols / 256) ** 0.5).all())


@pytest.mark.parametrize("name", cases.FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_extreme_codes_are_exact(name: str, isa: str) -> None:
    """All codes and all activations at their ends: a dot that saturates 16 bits shows here."""
    cols = 512
    weight = cases.extreme_weight(name, 20, cols)
    signs = torch.tensor([1.0, -1.0]).repeat(cols // 2)
    x = torch.stack([torch.ones(cols), -torch.ones(cols), signs, -signs, torch.zeros(cols)])
    exact = cases.multiplied(name, x, isa) @ weight.unpack().double().T
    with cases.running(isa, 1):
        found = cases.linear(weight, x)
    assert torch.allclose(found.double(), exact, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
def test_random_code_bytes_match_scalar(isa: str) -> None:
    """Bytes no packer would write: all codes, zero points and sub-scales occur."""
    generator = torch.Generator().manual_seed(5)
    for name in cases.FORMATS:
        weight = formats.get(name)
        if weight.is_float:
            continue
        data = torch.randint(
            0, 256, (weight.nbytes(32, 512),), dtype=torch.uint8, generator=generator
        )
        x = torch.randn(9, 512, generator=generator)
        outs = []
        for table in ("scalar", isa):
            with cases.running(table, 1):
                out = torch.zeros(9, 32)
                native.core.linear(None, x, name, data, 32, 512, out, cases.rows_of(9))
                outs.append(out)
        assert torch.allclose(*outs, rtol=0, atol=0, equal_nan=True), name


@pytest.mark.parametrize("name", ["int4-g32", "k2", "k6", "f32", "bf16", "fp8-g32"])
@pytest.mark.parametrize("isa", ISAS)
def test_non_finite_activations_give_nan_in_their_row_only(name: str, isa: str) -> None:
    weight = cases.random_weight(name, 32, 256)
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(2))
    with cases.running(isa, 1):
        clean = cases.linear(weight, x)
    for bad in (float("nan"), float("inf"), -float("inf")):
        dirty = x.clone()
        dirty[1, 77] = bad
        with cases.running(isa, 2):
            out = cases.linear(weight, dirty)
        assert not torch.isfinite(out[1]).any()
        assert torch.equal(out[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize("isa", ISAS)
def test_tiny_and_huge_activations(isa: str) -> None:
    weight = cases.random_weight("int8-g32", 16, 64)
    x = torch.stack([torch.full((64,), v) for v in (1e-38, 1e-31, 1e-29, 1e30, 0.0)])
    exact = cases.quantized(x) @ weight.unpack().double().T
    with cases.running(isa, 1):
        found = cases.linear(weight, x).double()
    assert torch.allclose(found, exact, rtol=1e-5)


def test_bias_and_accumulate() -> None:
    weight = cases.random_weight("int4-g32", 40, 96)
    x, bias = torch.randn(3, 96), torch.randn(40)
    plain = cases.linear(weight, x)
    assert torch.equal(cases.linear(weight, x, bias=bias), plain + bias)
    out = torch.randn(3, 40)
    expected = out + plain
    native.core.linear(
        None, x, "int4-g32", weight.data, 40, 96, out, cases.rows_of(3), accumulate=True
    )
    assert torch.equal(out, expected)


def test_only_live_rows_are_written() -> None:
    weight = cases.random_weight("int4-g32", 16, 32)
    out = torch.full((6, 16), 7.0)
    native.core.linear(
        None, torch.randn(6, 32), "int4-g32", weight.data, 16, 32, out, cases.rows_of(2)
    )
    assert bool((out[2:] == 7.0).all()) and not bool((out[:2] == 7.0).any())


def test_embedding_rows_decode_exactly() -> None:
    for name in cases.FORMATS:
        weight = cases.random_weight(name, 50, 70)
        ids = torch.tensor([49, 0, 17, 17], dtype=torch.int32)
        out = torch.zeros(4, 70)
        native.core.embed_tokens(None, ids, name, weight.data, 50, 70, out, cases.rows_of(4))
        assert torch.equal(out, weight.unpack()[ids.long()])
        ids[2] = 50
        with pytest.raises(InvalidRequest, match="token id 50 at row 2"):
            native.core.embed_tokens(None, ids, name, weight.data, 50, 70, out, cases.rows_of(4))


def test_wrong_arguments_are_refused() -> None:
    weight = cases.random_weight("int4-g32", 16, 32)
    x, out = torch.zeros(2, 32), torch.zeros(2, 16)
    with pytest.raises(UnsupportedFormat, match="int7"):
        native.core.linear(None, x, "int7-g32", weight.data, 16, 32, out, cases.rows_of(2))
    with pytest.raises(UnsupportedFormat, match="int4-g48"):
        native.core.linear(None, x, "int4-g48", weight.data, 16, 32, out, cases.rows_of(2))
    with pytest.raises(InvalidRequest, match="weight bytes"):
        native.core.linear(None, x, "int8-g32", weight.data, 16, 32, out, cases.rows_of(2))
    with pytest.raises(InvalidRequest, match="x width"):
        native.core.linear(
            None, torch.zeros(2, 33), "int4-g32", weight.data, 16, 32, out, cases.rows_of(2)
        )
    with pytest.raises(InvalidRequest, match="outside"):
        native.core.linear(None, x, "int4-g32", weight.data, 16, 32, out, cases.rows_of(3))

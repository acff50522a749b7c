"""Products of bfloat16 pairs: their rounding, step by step, and what is flushed to zero."""

from __future__ import annotations

import packed_cases as cases
import pytest
import torch
from torch import Tensor

from moestro import formats
from moestro.formats.base import PackedWeight

ISAS = [isa for isa in cases.PAIR_ISAS if isa in cases.ISAS]
#: of these the ones whose sums are chains as below; those of tiles are in test_amx.py
CHAINS = pytest.mark.parametrize("isa", [isa for isa in ISAS if not isa.startswith("amx")])


def chain(weights: Tensor, x: Tensor, start: Tensor) -> Tensor:
    """start [tokens, n] plus weights [n, k] times x [tokens, k], one float32 rounding per product,
    the odd channel of each pair first. Products of bfloat16 are exact in float64, and so is their
    sum with a float32 of about their size."""
    for k in range(0, weights.shape[1], 2):
        for channel in (k + 1, k):
            start = start + x[:, channel, None] * weights[None, :, channel]
            start = start.float().double()
    return start


def scaled_chains(codes: Tensor, scale: float, x: Tensor, group: int) -> Tensor:
    """Per run of at most 128 channels of a group two chains, of channels k % 4 = 0, 1 and 2, 3."""
    total = torch.zeros(x.shape[0], codes.shape[0], dtype=torch.float64)
    for begin in range(0, codes.shape[1], group):
        for first in range(begin, begin + group, 128):
            run = slice(first, min(first + 128, begin + group))
            quads_w = codes[:, run].unflatten(1, (-1, 4))
            quads_x = x[:, run].unflatten(1, (-1, 4))
            halves = [
                chain(quads_w[..., h].flatten(1), quads_x[..., h].flatten(1), 0 * total)
                for h in (slice(0, 2), slice(2, 4))
            ]
            both = (halves[0] + halves[1]).float().double()
            total = (total + both * scale).float().double()
    return total


@CHAINS
@pytest.mark.parametrize("tokens", [1, 3, 12, 29])
def test_bf16_rounds_once_per_product(isa: str, tokens: int) -> None:
    weight = cases.random_weight("bf16", 37, 600)
    x = torch.randn(tokens, 600, generator=torch.Generator().manual_seed(3))
    start = torch.zeros(tokens, 37, dtype=torch.float64)
    expected = chain(weight.unpack().double(), x.bfloat16().double(), start)
    with cases.running(isa, 1):
        assert torch.equal(cases.linear(weight, x).double(), expected)


@CHAINS
@pytest.mark.parametrize(("name", "cols"), [("fp8-g32", 96), ("fp8-g128", 384), ("fp8-row", 352)])
def test_fp8_scales_each_run_once(isa: str, name: str, cols: int) -> None:
    """All finite codes, subnormal ones too, with a scale that is a power of two."""
    weight = formats.get(name)
    group = weight.group(cols)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()]
    generator = torch.Generator().manual_seed(4)
    values = codes[torch.randint(len(codes), (33, cols), generator=generator)]
    values[:, ::group] = 448.0  # the largest of each group sets its scale
    packed = PackedWeight(weight, 33, cols, weight.pack(values / 8))
    assert torch.equal(packed.unpack(), values / 8)
    x = torch.randn(14, cols, generator=generator)
    expected = scaled_chains(values.double(), 1 / 8, x.bfloat16().double(), group)
    with cases.running(isa, 1):
        assert torch.equal(cases.linear(packed, x).double(), expected)
        assert torch.equal(cases.linear(packed, x[:1]).double(), expected[:1])


@pytest.mark.parametrize("isa", ISAS)
def test_activations_below_the_normal_range_are_zero(isa: str) -> None:
    weight = cases.random_weight("bf16", 16, 64)
    x = torch.full((2, 64), 1e-39)
    x[1, 5] = smallest = 2.0**-126
    with cases.running(isa, 1):
        out = cases.linear(weight, x)
    assert not out[0].any()
    products = weight.unpack()[:, 5].double() * smallest
    normal = products.abs() >= smallest
    assert 0 < int(normal.sum()) < 16
    assert torch.equal(out[1].double(), products * normal)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", cases.PAIR_FORMATS)
def test_the_distance_to_float32_activations_is_bounded(isa: str, name: str) -> None:
    """Each activation moves by at most 2^-9 of itself, so a sum by 2^-9 of its absolute terms."""
    weight = cases.random_weight(name, 40, 640)
    x = torch.randn(6, 640, generator=torch.Generator().manual_seed(5))
    bound = x.abs() @ weight.unpack().abs().T
    with cases.running("scalar", 1):
        plain = cases.linear(weight, x)
    with cases.running(isa, 1):
        error = (cases.linear(weight, x) - plain).abs()
    assert bool((error <= (2**-9 + 4e-7) * bound).all()) and bool((error > 0).any())

"""Rope frequencies and tables. Parity of the scalings with transformers is in tests/e2e."""

from __future__ import annotations

import math

import pytest
import torch

from moestro.nn.rope import (
    BandScaling,
    LinearScaling,
    Rope,
    RopeConfig,
    YarnScaling,
    inverse_frequencies,
    yarn_attention_factor,
)


def test_plain_frequencies_are_powers_of_theta():
    got = inverse_frequencies(RopeConfig(theta=10000.0, rotary_dim=8))
    torch.testing.assert_close(got, torch.tensor([1.0, 0.1, 0.01, 0.001]))


def test_linear_scaling_divides():
    got = inverse_frequencies(
        RopeConfig(theta=10000.0, rotary_dim=4, scaling=LinearScaling(factor=8.0))
    )
    torch.testing.assert_close(got, torch.tensor([1 / 8, 0.01 / 8]))


def test_bands_keep_short_waves_and_slow_down_long_ones():
    bands = BandScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=1000
    )
    plain = inverse_frequencies(RopeConfig(theta=1e6, rotary_dim=64))
    got = inverse_frequencies(RopeConfig(theta=1e6, rotary_dim=64, scaling=bands))
    wavelength = 2 * math.pi / plain
    assert torch.equal(got[wavelength < 250], plain[wavelength < 250])
    torch.testing.assert_close(got[wavelength > 1000], plain[wavelength > 1000] / 8)
    between = (wavelength > 250) & (wavelength < 1000)
    assert between.any()
    assert ((got < plain) & (got > plain / 8))[between].all()


def test_yarn_blends_between_its_ends():
    yarn = YarnScaling(factor=4.0, original_context=2048, attention_factor=1.0)
    plain = inverse_frequencies(RopeConfig(theta=10000.0, rotary_dim=128))
    got = inverse_frequencies(RopeConfig(theta=10000.0, rotary_dim=128, scaling=yarn))
    ratio = got / plain
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(0.25)
    assert (ratio.diff() <= 1e-6).all()


def test_yarn_with_equal_ends_does_not_divide_by_zero():
    yarn = YarnScaling(
        factor=4.0, original_context=10**9, attention_factor=1.0, beta_fast=1e-9, beta_slow=1e-9
    )
    got = inverse_frequencies(RopeConfig(theta=10.0, rotary_dim=2, scaling=yarn))
    assert torch.isfinite(got).all()


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ((1.0,), 1.0),
        ((0.5,), 1.0),
        ((40.0,), 0.1 * math.log(40) + 1),
        ((40.0, 1.0, 1.0), 1.0),
        ((40.0, 0.707, 1.0), (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)),
        ((40.0, 0.707, None), 0.1 * math.log(40) + 1),
    ],
)
def test_yarn_attention_factor(arguments, want: float):
    assert yarn_attention_factor(*arguments) == pytest.approx(want)


def test_tables_hold_divisors_and_attention_factor():
    yarn = YarnScaling(factor=2.0, original_context=64, attention_factor=1.5)
    config = RopeConfig(theta=100.0, rotary_dim=4, scaling=yarn)
    divisors = torch.tensor([1.0, 2.0])
    rope = Rope.build(config, max_positions=7, frequency_divisors=divisors)
    assert rope.cos.shape == rope.sin.shape == (7, 2)
    assert rope.cos.dtype == torch.float32
    angles = torch.arange(7)[:, None] * inverse_frequencies(config) / divisors
    torch.testing.assert_close(rope.cos, 1.5 * angles.cos())
    torch.testing.assert_close(rope.sin, 1.5 * angles.sin())

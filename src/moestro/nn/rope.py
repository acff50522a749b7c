"""Rotary position embedding (arXiv:2104.09864): frequencies, their scalings, and the tables.

Every scaling is a pure function from the plain inverse frequencies to scaled ones, so a model's
tables are fixed when it is built; scalings that depend on the current length have no place here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moestro.ops.contracts import Ops


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by ``factor`` (arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class BandScaling:
    """Long wavelengths slowed down by ``factor``, short ones kept, smooth between.

    Wavelengths above original_context / low_freq_factor are scaled, those below
    original_context / high_freq_factor are kept.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """NTK by parts (arXiv:2309.00071): a ramp over channels between the ones that turn
    ``beta_fast`` and ``beta_slow`` times in ``original_context``, and a factor on cos and sin.

    truncate: round the ramp's ends outward to whole channels.
    """

    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


Scaling = LinearScaling | BandScaling | YarnScaling


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """The factor on cos and sin that the paper recommends (its equation 22)."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """theta: base period. rotary_dim: channels of each head that turn, even. interleaved: pairs are
    neighbouring channels, not those half the rotary_dim apart.
    """

    theta: float
    rotary_dim: int
    scaling: Scaling | None = None
    interleaved: bool = False


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """Radians per position of each channel pair, float32 [rotary_dim / 2]."""
    exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    periods = config.theta**exponent
    match config.scaling:
        case None:
            return 1.0 / periods
        case LinearScaling(factor=factor):
            return 1.0 / periods / factor
        case BandScaling() as bands:
            return _scale_bands(1.0 / periods, bands)
        case YarnScaling() as yarn:
            kept = _yarn_kept(config, yarn)
            return 1.0 / (yarn.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _scale_bands(inverse: Tensor, bands: BandScaling) -> Tensor:
    wavelength = 2 * math.pi / inverse
    turns = bands.original_context / wavelength
    smooth = (turns - bands.low_freq_factor) / (bands.high_freq_factor - bands.low_freq_factor)
    blended = (1 - smooth) * inverse / bands.factor + smooth * inverse
    is_long = wavelength > bands.original_context / bands.low_freq_factor
    is_short = wavelength < bands.original_context / bands.high_freq_factor
    return torch.where(is_long, inverse / bands.factor, torch.where(is_short, inverse, blended))


def _yarn_kept(config: RopeConfig, yarn: YarnScaling) -> Tensor:
    """How much of each pair's plain frequency stays: 1 for fast pairs, 0 for slow ones."""
    dim = config.rotary_dim

    def pair_with_turns(turns: float) -> float:
        length = yarn.original_context / (turns * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(config.theta))

    low, high = pair_with_turns(yarn.beta_fast), pair_with_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)
    return 1 - ramp.clamp(0, 1)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """cos, sin float32 [max_positions, rotary_dim / 2], with any attention factor inside."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    @staticmethod
    def build(
        config: RopeConfig, *, max_positions: int, frequency_divisors: Tensor | None = None
    ) -> Rope:
        """Tables for positions 0..max_positions - 1.

        frequency_divisors: float32 [rotary_dim / 2] that some checkpoints carry as a tensor in
        place of scaling parameters.
        """
        inverse = inverse_frequencies(config)
        if frequency_divisors is not None:
            inverse = inverse / frequency_divisors
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inverse
        scale = config.scaling.attention_factor if isinstance(config.scaling, YarnScaling) else 1.0
        return Rope(
            cos=angles.cos() * scale, sin=angles.sin() * scale, interleaved=config.interleaved
        )

    def forward(
        self,
        ops: Ops,
        x: Tensor,
        positions: Tensor,
        rows: Tensor,
        *,
        heads: int,
        offset: int = 0,
    ) -> None:
        """Turn x [T, heads * head_dim] in place, each head's channels from ``offset`` on."""
        ops.rope(
            x,
            positions,
            self.cos,
            self.sin,
            rows,
            heads=heads,
            interleaved=self.interleaved,
            offset=offset,
        )

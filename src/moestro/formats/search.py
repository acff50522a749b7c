"""Error-minimizing scales: for each group try many grids, fit each by least squares, keep the best.

All functions take x float32 [..., g] (one group in the last axis) and w, the weight of each squared
error, broadcastable to x or None for all ones. A trial places the group's extreme on some level,
rounds all values to codes, fits the scale to those codes in closed form, rounds the scale as it
will be stored, and measures the true error with it. So the storage rounding is part of the search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moestro.core.errors import CheckpointError

#: half of float16's smallest positive number: a group of smaller values is best stored as zero
_TINY = 2.0**-25

_F16_MAX = 65504.0

Floats = npt.NDArray[np.float32]
Rounding = Callable[[Tensor], Tensor]


def to_f16(values: Tensor) -> Tensor:
    """Round to float16, as float32 (beyond 65504: inf, which no trial survives)."""
    return values.to(torch.float16).to(torch.float32)


def keep_f32(values: Tensor) -> Tensor:
    """No rounding, for scales that a second level rounds later."""
    return values


def reciprocal(scale: Tensor) -> Tensor:
    """1 / scale, and 0 where the scale is 0."""
    return torch.where(scale != 0, 1.0 / scale, torch.zeros_like(scale))


def group_sum(values: Tensor) -> Tensor:
    """Sum over the last axis, keeping it: in order within 32 channels, then over those sums.

    One order everywhere makes one choice between nearly equal trials: csrc/algo/pack_search.h sums
    in this order too.
    """
    size = values.shape[-1]
    part = torch.zeros(())
    blocks = values.reshape(*values.shape[:-1], -1, min(size, 32))
    for channel in blocks.movedim(-1, 0).contiguous():
        part = part + channel
    total = torch.zeros(())
    for block in part.unbind(-1):
        total = total + block
    return total.unsqueeze(-1)


def weighted_sum(values: Tensor, w: Tensor | None) -> Tensor:
    """Sum over the group, keeping the axis."""
    return group_sum(values if w is None else values * w)


def squared_error(x: Tensor, decoded: Tensor, w: Tensor | None) -> Tensor:
    residual = x - decoded
    return weighted_sum(residual.mul_(residual), w)


def round_codes(x: Tensor, scale: Tensor, lo: int, hi: int) -> Tensor:
    """Nearest codes (float32) of x on the grid scale * integer within lo..hi."""
    return (x * reciprocal(scale)).round_().clamp_(lo, hi)


def fit_symmetric(
    x: Tensor,
    w: Tensor | None,
    *,
    lo: int,
    hi: int,
    levels: Sequence[float],
    rounding: Rounding = to_f16,
) -> Tensor:
    """Scales [..., 1] (of either sign) so that x is near scale * integer in lo..hi.

    ``levels``: where a trial puts the value of largest magnitude, before clamping to lo..hi.
    Raises CheckpointError where no scale within float16 serves.
    """

    def near(scaled: Tensor) -> Tensor:
        return scaled.round_().clamp_(lo, hi)

    return _fit_scale(x, w, near, max(-lo, hi), levels, rounding)


class Table:
    """Sixteen whole numbers within -127..127 that 4-bit indices stand for."""

    def __init__(self, values: Sequence[int]) -> None:
        #: float32 value of each index
        self.array: Floats = np.array(values, dtype=np.float32)
        # The nearest of them is the same throughout [n / 2, n / 2 + 1 / 2): halfway points between
        # whole numbers lie on multiples of a half.
        middles = np.arange(-256, 256, dtype=np.float32) / 2 + np.float32(0.25)
        index = np.abs(middles[:, None] - self.array).argmin(axis=1)
        self._index = torch.from_numpy(index.astype(np.uint8))
        self._value = torch.from_numpy(self.array[index])

    def near(self, scaled: Tensor) -> Tensor:
        """The nearest value of the table, float32. May overwrite ``scaled``."""
        return self._value[_half_steps(scaled)]

    def nearest(self, x: Tensor, scale: Tensor) -> Tensor:
        """The nearest value of the table to x / scale, float32."""
        return self.near(x * reciprocal(scale))

    def indices(self, x: Tensor, scale: Tensor) -> Tensor:
        """The index of ``nearest``, uint8."""
        return self._index[_half_steps(x * reciprocal(scale))]


def fit_table(
    x: Tensor,
    w: Tensor | None,
    table: Table,
    *,
    levels: Sequence[float],
    rounding: Rounding = to_f16,
) -> Tensor:
    """As ``fit_symmetric``, so that x is near scale * a value of the table."""
    return _fit_scale(x, w, table.near, 127, levels, rounding)


def fit_zero_point(
    x: Tensor, w: Tensor | None, *, hi: int, levels: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """(scale, zero), each [..., 1], so that x is near scale * (code - zero), code and zero 0..hi.

    ``levels``: how many steps a trial spreads the range over (the range always includes zero).
    """
    low = x.amin(-1, keepdim=True).clamp_(max=0)
    span = x.amax(-1, keepdim=True).clamp_(min=0) - low
    inverse = torch.where(span > _TINY, 1.0 / span, torch.zeros_like(span))
    best, best_zero = torch.zeros_like(span), torch.zeros_like(span)
    best_error = weighted_sum(x * x, w)
    for level in levels:
        zero = (low * (inverse * -level)).round_().clamp_(0, hi)
        codes = (x * (inverse * level)).round_().add_(zero).clamp_(0, hi).sub_(zero)
        scale = to_f16(_least_squares(x, codes, w))
        error = squared_error(x, codes * scale, w)
        better = error < best_error
        best = torch.where(better, scale, best)
        best_zero = torch.where(better, zero, best_zero)
        best_error = torch.where(better, error, best_error)
    if bool(((best == 0) & (span > 1.0)).any()):
        raise _overflow(float(x.abs().max()), hi)
    return best, best_zero


def fit_affine(
    x: Tensor,
    w: Tensor | None,
    *,
    hi: int,
    levels: Sequence[float],
    rounding: Rounding = to_f16,
    nonpositive: bool = False,
) -> tuple[Tensor, Tensor]:
    """(scale, minimum), each [..., 1], so that x is near scale * code + minimum, code 0..hi.

    ``nonpositive``: the minimum may not exceed zero (formats that store its negative unsigned).
    """
    low = x.amin(-1, keepdim=True)
    if nonpositive:
        low = low.clamp(max=0)
    shifted = x - low
    span = shifted.amax(-1, keepdim=True)
    inverse = torch.where(span > _TINY, 1.0 / span, torch.zeros_like(span))
    total = weighted_sum(torch.ones_like(x), w)
    mean = weighted_sum(shifted, w) * reciprocal(total)

    def bound(minimum: Tensor) -> Tensor:
        minimum = minimum.clamp(max=0) if nonpositive else minimum
        return rounding(minimum)

    best = torch.zeros_like(span)
    best_low = torch.where(total > 0, bound(mean + low), best)
    best_error = squared_error(x, best_low, w)
    for level in levels:
        codes = (shifted * (inverse * level)).round_().clamp_(0, hi)
        centre = weighted_sum(codes, w) * reciprocal(total)
        scale = rounding(_least_squares(shifted - mean, codes - centre, w).clamp_(min=0))
        minimum = bound(low + mean - scale * centre)
        error = squared_error(x, codes * scale + minimum, w)
        better = error < best_error
        if nonpositive:
            # A bound that bites makes the joint fit suboptimal: refit the scale through zero.
            through = rounding(_least_squares(x, codes, w).clamp_(min=0))
            through_error = squared_error(x, codes * through, w)
            use = through_error < torch.minimum(error, best_error)
            scale = torch.where(use, through, scale)
            minimum = torch.where(use, torch.zeros_like(minimum), minimum)
            error = torch.where(use, through_error, error)
            better = better | use
        best = torch.where(better, scale, best)
        best_low = torch.where(better, minimum, best_low)
        best_error = torch.where(better, error, best_error)
    if not bool((torch.isfinite(best_error) & torch.isfinite(best_low)).all()):
        raise _overflow(float(x.abs().max()), hi)
    return best, best_low


def fit_shared_scale(
    values: Tensor, weight: Tensor, *, lo: int, hi: int, divisors: Sequence[int]
) -> Tensor:
    """Second level: float16 d [..., 1] so that values [..., s] are near d * integer in lo..hi."""
    magnitude, index = values.abs().max(-1, keepdim=True)
    extreme = values.gather(-1, index)
    best = torch.zeros_like(extreme)
    best_error = weighted_sum(values * values, weight)
    for divisor in divisors:
        d = to_f16(extreme / divisor)
        error = squared_error(values, round_codes(values, d, lo, hi) * d, weight)
        better = error < best_error
        best = torch.where(better, d, best)
        best_error = torch.where(better, error, best_error)
    if bool(((best == 0) & (magnitude > 1.0)).any()):
        raise _overflow(float(magnitude.max()), max(-lo, hi))
    return best


def _fit_scale(
    x: Tensor,
    w: Tensor | None,
    near: Callable[[Tensor], Tensor],
    largest: int,
    levels: Sequence[float],
    rounding: Rounding,
) -> Tensor:
    """Scales [..., 1] for the codes that ``near`` gives for x / scale; ``largest`` of them."""
    magnitude, index = x.abs().max(-1, keepdim=True)
    inverse = torch.where(magnitude > _TINY, 1.0 / x.gather(-1, index), torch.zeros_like(magnitude))
    best = torch.zeros_like(magnitude)
    best_error = weighted_sum(x * x, w)

    def consider(scale: Tensor, codes: Tensor) -> None:
        nonlocal best, best_error
        error = squared_error(x, codes * scale, w)
        better = (error < best_error) & (magnitude > _TINY)
        best = torch.where(better, scale, best)
        best_error = torch.where(better, error, best_error)

    for level in levels:
        codes = near(x * (inverse * level))
        consider(rounding(_least_squares(x, codes, w)), codes)
    refined = rounding(_least_squares(x, near(x * reciprocal(best)), w))
    refined = torch.where(best != 0, refined, best)
    consider(refined, near(x * reciprocal(refined)))
    if bool(((best == 0) & (magnitude > 1.0) & (best_error > 0)).any()):
        raise _overflow(float(magnitude.max()), largest)
    return best


def _half_steps(scaled: Tensor) -> Tensor:
    """Which [n / 2, n / 2 + 1 / 2) each lies in, n + 256 within 0..511."""
    return scaled.mul_(2).floor_().clamp_(-256, 255).add_(256).to(torch.int64)


def _least_squares(x: Tensor, codes: Tensor, w: Tensor | None) -> Tensor:
    weighted = codes if w is None else codes * w
    numerator, denominator = group_sum(weighted * x), group_sum(weighted * codes)
    return torch.where(denominator > 0, numerator / denominator, torch.zeros_like(numerator))


def _overflow(largest: float, codes: int) -> CheckpointError:
    return CheckpointError(
        f"weights up to {largest:.4g} need a scale beyond float16 (largest {_F16_MAX:.0f} x "
        f"{codes}); keep this tensor in a float format"
    )

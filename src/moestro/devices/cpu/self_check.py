"""Whether the kernels of this CPU give what the formats say, checked before a format is first used.

A miscompiled kernel, a faulty core or a wrong emulator does not crash: it writes fluent nonsense.
So a small product of every format that a model brings is compared with the reference decode in
float64, and for integer formats with the bits of the plainest kernels. It takes milliseconds per
format, once per process; what passed is remembered in the cache directory until the CPU or the
build changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moestro import _core as core
from moestro import formats, native
from moestro.core.errors import SelfCheckError
from moestro.devices.cpu.self_check_cache import PassedCache
from moestro.formats.base import LANES

# Tokens of each product: both sides of where kernels for few tokens give way to those for many.
_TOKENS = (1, 5, 37)
# A pair of tiles and a lone one that is not full; groups of every size, and a last one cut short.
_ROWS, _COLS = 2 * LANES + 7, 547
# Half the distance of float32 numbers near one.
_ROUNDING = 2.0**-24

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first element of a product of ``tokens`` rows that is not what the format says."""

    format_name: str
    isa: str
    tokens: int
    token: int
    channel: int
    found: float
    expected: float

    def __str__(self) -> str:
        return (
            f"token {self.token} of {self.tokens}, channel {self.channel}: {self.found:.9g} "
            f"instead of {self.expected:.9g}"
        )


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A packed weight, activations [37, K], their product in float64 and how far rounding may
    lead from it; for integer formats also the plainest kernels' result, whose bits are the rule.
    """

    data: Tensor
    x: Tensor
    expected: Doubles
    slack: Doubles
    bits: Floats | None


_passed: set[tuple[str, str]] = set()


def require(format_names: Iterable[str], isa: str | None = None) -> None:
    """Check the kernels of an instruction set (default: the one in use) for these formats, unless
    that was done before.

    Raises SelfCheckError naming format, instruction set and first wrong element.
    """
    isa = isa or native.isa()
    todo = [n for n in sorted(set(format_names)) if (n, isa) not in _passed]
    if not todo:
        return
    remembered = PassedCache.open()
    for name in todo:
        if not remembered.has(name, isa):
            difference = first_difference(name, isa)
            if difference is not None:
                raise SelfCheckError(_message(difference))
        _passed.add((name, isa))
    remembered.add(todo, isa)


def first_difference(format_name: str, isa: str) -> Difference | None:
    """Compare now, whatever is remembered; None if all is right. ``isa`` must be supported here."""
    case = _case(format_name)
    for tokens in _TOKENS:
        found = _multiply(format_name, isa, case.data, case.x[:tokens])
        # Written so that a NaN is a difference.
        right = np.abs(found - case.expected[:tokens]) <= case.slack[:tokens]
        expected: NDArray[np.floating] = case.expected
        if case.bits is not None and bool(right.all()):
            right, expected = found == case.bits[:tokens], case.bits
        if not bool(right.all()):
            token, channel = (int(i) for i in np.argwhere(~right)[0])
            return Difference(
                format_name=format_name,
                isa=isa,
                tokens=tokens,
                token=token,
                channel=channel,
                found=float(found[token, channel]),
                expected=float(expected[token, channel]),
            )
    return None


def table(
    format_names: Collection[str] | None = None,
) -> dict[str, dict[str, Difference | None]]:
    """instruction set supported here -> format with kernels -> what is wrong."""
    names = formats.names() if format_names is None else format_names
    known = set(core.format_names())
    return {
        isa: {name: first_difference(name, isa) for name in names if name in known}
        for isa in native.supported_isas()
    }


def _multiply(format_name: str, isa: str, data: Tensor, x: Tensor) -> Floats:
    out = torch.zeros(x.shape[0], _ROWS)
    core.multiply(isa, x, format_name, data, _ROWS, _COLS, out)
    return out.numpy()


@cache
def _case(format_name: str) -> _Case:
    weight = formats.get(format_name)
    random = np.random.default_rng(1)
    values = random.standard_normal((_ROWS, _COLS), dtype=np.float32)
    values[:, ::31] *= 3  # so that codes at the ends of the range occur everywhere
    values[0], values[1] = 1, -1
    if weight.quantizes:
        data = weight.pack(torch.from_numpy(values))
    else:
        data = weight.example(_ROWS, _COLS)
    # Of few digits, so that they are exact in every type that kernels multiply in.
    x = random.standard_normal((max(_TOKENS), _COLS), dtype=np.float32)
    x = (np.round(x * 32) / 32).astype(np.float32)
    x[2], x[3] = 1, -1
    seen = x.astype(np.float64) if weight.is_float else _quantized(x)
    decoded = weight.unpack(data, _ROWS, _COLS).numpy().astype(np.float64)
    x_tensor = torch.from_numpy(x)
    plainest = native.built_isas()[0]
    return _Case(
        data=data,
        x=x_tensor,
        expected=seen @ decoded.T,
        # Every term of a chain of K fused multiply-adds is rounded at most K times, and a few
        # times more where a weight is a product of scales.
        slack=(_COLS + 16) * _ROUNDING * (np.abs(seen) @ np.abs(decoded).T),
        bits=None if weight.is_float else _multiply(format_name, plainest, data, x_tensor),
    )


def _quantized(x: Floats) -> Doubles:
    """The activations that integer kernels multiply: signed bytes with the scale amax / 127 per 32
    channels, rounded half to even.
    """
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(x.shape[0], -1, 32)
    amax = np.abs(padded).max(axis=-1, keepdims=True)
    codes = np.rint(padded * (np.float32(127) / amax))
    values = codes.astype(np.float64) * (amax / np.float32(127)).astype(np.float64)
    return values.reshape(x.shape[0], -1)[:, : x.shape[1]]


def _message(difference: Difference) -> str:
    name, isa = difference.format_name, difference.isa
    good = [i for i in native.supported_isas() if i != isa and first_difference(name, i) is None]
    way_out = (
        f"Run with MOESTRO_ISA={good[-1]}, whose kernels are right"
        if good
        else "No other instruction set of this CPU is right either, so use another format"
    )
    return (
        f"self-check: the kernels of format {name} on instruction set {isa} compute wrongly here "
        f"({difference}). {way_out}, and please report it with the output of: moestro doctor"
    )

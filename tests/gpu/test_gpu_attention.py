"""Attention on the accelerator against the float64 reference, and alone as in a batch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import attention_cases
import pytest
import test_latent_attention as latent_cases
import torch
from attention_cases import DTYPES, ORACLE
from torch import Tensor

from moestro.core.errors import UnsupportedOp
from moestro.devices.cuda import attention
from moestro.devices.cuda.ops import CudaOps
from moestro.ops.contracts import Batch

#: one token, one that sees two segments, the last of a page, and two in a row
LENGTHS = [1, 20, attention.SEGMENT + 9]
PARTS = [(0, 0, 1), (2, attention.SEGMENT + 3, attention.SEGMENT + 5), (1, 15, 16)]


def on(place: torch.device, thing: Any) -> Any:
    """A dataclass of tensors, elsewhere."""
    there = {
        f.name: value.to(place)
        for f in fields(thing)
        if isinstance(value := getattr(thing, f.name), Tensor)
    }
    return replace(thing, **there)


class Moving:
    """Runs a case's op where the kernels run, with ``spare`` more rows than are live."""

    def __init__(self, ops: CudaOps, place: torch.device, spare: int = 0) -> None:
        self.ops, self.place, self.spare = ops, place, spare

    def batch(self, batch: Batch) -> Batch:
        def longer(x: Tensor) -> Tensor:
            return torch.cat([x, x.new_zeros(self.spare)])

        names = ("token_ids", "positions", "slots")
        return on(self.place, replace(batch, **{n: longer(getattr(batch, n)) for n in names}))

    def rows(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(self.spare, x.shape[1])]).to(self.place)

    def attention(
        self, q: Tensor, cache: Any, out: Tensor, batch: Batch, *, sinks: Tensor | None, **rest: Any
    ) -> None:
        sinks = None if sinks is None else sinks.to(self.place)
        found = self.rows(out)
        self.ops.attention(
            self.rows(q), on(self.place, cache), found, self.batch(batch), sinks=sinks, **rest
        )
        out.copy_(found[: len(out)])
        assert not found[len(out) :].any()

    def latent_attention(
        self, q: Tensor, absorbed: Tensor, cache: Any, out: Tensor, batch: Batch, **rest: Any
    ) -> None:
        found = self.rows(absorbed)
        self.ops.latent_attention(
            self.rows(q), found, on(self.place, cache), found, self.batch(batch), **rest
        )
        out.copy_(found[: len(out)])


def bound(dtype: torch.dtype, largest: float) -> float:
    """What rounding probabilities to the cache's type may cost, or float32 sums."""
    step = {torch.float32: 2.0**-18, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    return step * largest


def check(case: attention_cases.Case, ops: CudaOps, place: torch.device) -> None:
    case.write()
    got = case.attend(PARTS, Moving(ops, place))
    scale, rows = case.head_dim**-0.5, case.batch(PARTS)[1]
    rounded = (case.queries(rows) * scale).to(case.cache.k.dtype).float() / scale
    exact = case.attend(PARTS, ORACLE, rounded)
    assert (got - exact).abs().max() <= bound(case.cache.k.dtype, float(case.v.abs().max()))
    # As many tokens as join their own segments.
    assert torch.equal(case.attend(PARTS, Moving(ops, place, spare=attention.FEW_TOKENS)), got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 6, "kv_heads": 2, "head_dim": 20},
        {"heads": 20, "kv_heads": 1, "head_dim": 16, "page_size": 48},
    ],
)
def test_grouped_queries(
    shape: dict[str, int], dtype: torch.dtype, ops: CudaOps, place: torch.device
) -> None:
    check(attention_cases.Case(LENGTHS, dtype=dtype, **shape), ops, place)


@pytest.mark.parametrize("options", [{"window": 5}, {"window": 200, "softcap": 0.5, "sinks": 1.0}])
def test_windows_caps_and_sinks(
    options: dict[str, float], ops: CudaOps, place: torch.device
) -> None:
    check(attention_cases.Case(LENGTHS, heads=2, kv_heads=1, head_dim=16, **options), ops, place)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [{"heads": 3, "rank": 20, "rope": 6}, {"heads": 18, "rank": 32}])
def test_latent_rows(
    shape: dict[str, int], dtype: torch.dtype, ops: CudaOps, place: torch.device
) -> None:
    case = latent_cases.Case(LENGTHS, dtype=dtype, **shape)
    case.write()
    got = case.attend(PARTS, Moving(ops, place))
    case.q = (case.q * case.scale).to(dtype).float() / case.scale
    case.absorbed = (case.absorbed * case.scale).to(dtype).float() / case.scale
    exact = case.attend(PARTS, ORACLE)
    # what the cache was written from is not larger than what it holds
    rows = case.cache.rows[..., : case.rank]
    largest = float(rows[rows.isfinite()].abs().max())
    assert (got - exact).abs().max() <= bound(dtype, largest)


def test_latent_rows_alone_as_among_many(ops: CudaOps, place: torch.device) -> None:
    case = latent_cases.Case(LENGTHS, dtype=torch.bfloat16)
    case.write()
    spare = attention.FEW_TOKENS
    got = case.attend(PARTS, Moving(ops, place))
    assert torch.equal(case.attend(PARTS, Moving(ops, place, spare=spare)), got)


def test_what_has_no_kernel_is_refused(ops: CudaOps, place: torch.device) -> None:
    case = attention_cases.Case([3], head_dim=16, dtype=torch.int8)
    with pytest.raises(UnsupportedOp, match="no kernel on this device for a cache of signed bytes"):
        case.attend(ops=Moving(ops, place))
    case = attention_cases.Case([3], heads=3, kv_heads=2, head_dim=16)
    with pytest.raises(UnsupportedOp, match="3 heads do not share 2 kv heads"):
        case.attend(ops=Moving(ops, place))

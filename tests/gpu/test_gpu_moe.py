"""Routed experts on the accelerator: the CPU's bits for integer formats, edges of routing."""

from __future__ import annotations

from dataclasses import replace

import gpu_cases
import packed_cases
import pytest
import torch
from gpu_cases import Table, is_float, rows_of, unwritten
from test_moe import Case, make
from torch import Tensor

from moestro.core.errors import UnsupportedOp
from moestro.devices.cuda import launches
from moestro.devices.cuda.ops import CudaOps
from moestro.ops.contracts import ACTIVATIONS, SharedExperts


def run(
    ops: CudaOps,
    place: torch.device,
    case: Case,
    out: Tensor | None = None,
    live: int | None = None,
    **options: object,
) -> Tensor:
    tokens, hidden = case.x.shape
    result = unwritten(tokens, hidden, place=place) if out is None else out.to(place)
    ops.moe(
        case.x.to(place), case.ids.to(place), case.weights.to(place), Table(case.bank, place),
        result, rows_of(tokens if live is None else live, place), **options,
    )  # fmt: skip
    return result.cpu()


@pytest.mark.parametrize(
    "names",
    [
        ("int4-g32", "int4-g32", "int4-g32"),
        ("k4", "k4", "k6"),
        ("mxfp4", "mxfp4", "mxfp4"),
        ("int8-g32", "k5", "int4m-g32"),
    ],
)
def test_the_bits_of_the_cpu(
    names: tuple[str, str, str], ops: CudaOps, place: torch.device
) -> None:
    case = make(names, tokens=1, hidden=40, inter=36)
    assert torch.equal(run(ops, place, case), case.run())


@pytest.mark.parametrize("names", [("bf16", "bf16", "bf16"), ("f16", "int4-g32", "fp8-g32")])
def test_values_of_float_formats(
    names: tuple[str, str, str], ops: CudaOps, place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make(names, tokens=2, hidden=40, inter=36)
    assert is_float(*names)
    monkeypatch.setattr(packed_cases, "multiplied", gpu_cases.seen)
    exact = case.expected()
    # an activation between the products that lies near a rounding boundary may fall to the other
    # side: one step of bfloat16's 256
    assert (run(ops, place, case) - exact).abs().max() <= 4e-3 * exact.abs().max()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_biases(activation: str, ops: CudaOps, place: torch.device) -> None:
    names = ("int4-g32", "int4-g32", "int4-g32")
    case = make(names, tokens=1, hidden=32, inter=32, activation=activation, biased=True)
    case.x.mul_(4)
    assert torch.equal(run(ops, place, case), case.run())


def test_experts_shared_by_blocks_of_tokens(ops: CudaOps, place: torch.device) -> None:
    """More pairs than experts, so that some fill a block, some share one, and one has none."""
    case = make(("int4-g32", "int4-g32", "int4-g32"), tokens=40, hidden=32, inter=32, experts=4)
    case.ids[:, 0] = 1
    case.ids[:, 1] = torch.arange(40) % 2 * 2
    case.ids[5] = torch.tensor([-1, 2])
    case.ids[6] = -1
    out = torch.randn(40, 32, generator=torch.Generator().manual_seed(5))
    got = run(ops, place, case, out, live=39)
    assert torch.equal(got[:39], case.run(rows=slice(39)))
    assert torch.equal(got[39], out[39])
    assert not got[6].any()


def test_every_pair_is_in_one_block(place: torch.device) -> None:
    random = torch.Generator().manual_seed(6)
    ids = torch.randint(-1, 9, (60, 3), dtype=torch.int32, generator=random)
    grouping = launches.group(ids.to(place), rows_of(50, place), 8)
    found = []
    for expert, first, end in grouping.spans.tolist():
        if expert < 0:
            continue
        block = grouping.order[first : min(end, first + grouping.height)].tolist()
        assert block and all(ids.flatten()[pair] == expert for pair in block)
        assert block == sorted(block)
        found += block
    flat = ids[:50].flatten()
    assert sorted(found) == [i for i, e in enumerate(flat.tolist()) if 0 <= e < 8]


def test_accumulation_and_shared_experts(ops: CudaOps, place: torch.device) -> None:
    names = ("int4-g32", "int4-g32", "int4-g32")
    case = make(names, tokens=2, hidden=32, inter=32)
    other = make(("int8-g32", "int8-g32", "int8-g32"), tokens=2, hidden=32, inter=64, seed=7)
    out = torch.randn(2, 32, generator=torch.Generator().manual_seed(8))
    shared = SharedExperts(
        experts=Table(other.bank, place), ids=other.ids.to(place), weights=other.weights.to(place)
    )
    expected = case.run(out.clone(), accumulate=True)
    expected = replace(other, x=case.x).run(expected, accumulate=True)
    got = run(ops, place, case, out, accumulate=True, shared=shared)
    assert torch.equal(got, expected)


def test_tokens_whose_expert_is_not_there_become_nan(ops: CudaOps, place: torch.device) -> None:
    case = make(("int4-g32", "int4-g32", "int4-g32"), tokens=3, hidden=32, inter=32, experts=4)
    case.ids.copy_(torch.tensor([[0, 1], [1, 2], [0, 4]]))
    table = Table(case.bank, place, kept={0, 1, 3})
    out = unwritten(3, 32, place=place)
    ops.moe(
        case.x.to(place), case.ids.to(place), case.weights.to(place), table, out,
        rows_of(3, place),
    )  # fmt: skip
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert out[2].isnan().all()


def test_parts_of_the_experts_fill_one_set_of_slots(ops: CudaOps, place: torch.device) -> None:
    case = make(("int4-g32", "k4", "k6"), tokens=2, hidden=32, inter=32, biased=True)
    case.ids.copy_(torch.tensor([[3, 1], [4, -1]]))
    x, ids, rows = case.x.to(place), case.ids.to(place), rows_of(2, place)
    y, out = unwritten(2, 2, 32, place=place), unwritten(2, 32, place=place)
    ops.moe_slots(x, ids, Table(case.bank, place, kept={1, 2}), y, rows)
    assert y[0, 1].isfinite().all() and y[0, 0].isnan().all() and y[1].isnan().all()
    ops.moe_slots(x, ids, Table(case.bank, place, kept={0, 3, 4}), y, rows)
    assert y[1, 1].isnan().all()
    ops.combine_experts(y, ids, case.weights.to(place), out, rows)
    assert torch.equal(out.cpu(), case.run())


def test_unknown_activations_are_refused(ops: CudaOps, place: torch.device) -> None:
    case = make(("int4-g32", "int4-g32", "int4-g32"), tokens=1, hidden=32, inter=32)
    case.bank.activation = "cube"
    with pytest.raises(UnsupportedOp, match="no kernel for activation cube; known: silu"):
        run(ops, place, case)

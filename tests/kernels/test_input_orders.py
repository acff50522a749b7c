"""Weights whose columns are not in the order of the input: the same bits as from ordered input."""

from __future__ import annotations

from dataclasses import replace

import packed_cases as cases
import pytest
import torch
from test_moe import make

from moestro import native
from moestro.core.errors import CheckpointError, InvalidRequest
from moestro.formats.base import PackedWeight
from moestro.memory.expert_bank import ExpertBank

ISAS = native.supported_isas()
FORMATS = ["int4-g32", "int4z-g64", "int8-row", "bf16"]


def shuffled(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).int()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("cols", [1, 45, 256, 600])
def test_linear(name: str, cols: int):
    weight = cases.random_weight(name, 37, cols)
    order = shuffled(cols)
    x = torch.randn(19, cols, generator=torch.Generator().manual_seed(cols))
    arranged = x[:, order.long()].contiguous()
    for isa in ISAS:
        with cases.running(isa, 2):
            found = cases.linear(weight, x, input_order=order)
            assert torch.equal(found, cases.linear(weight, arranged)), isa
    ordered = replace(weight, input_order=order)
    plain = weight.unpack().double() @ arranged.double().T
    assert torch.allclose(ordered.unpack().double() @ x.double().T, plain, rtol=1e-12)


@pytest.mark.parametrize("names", [("int4-g32",) * 3, ("bf16",) * 3, ("int4-g32", "bf16", "k4")])
@pytest.mark.parametrize("tokens", [1, 7, 150])
def test_every_expert_has_an_order_of_its_own(names: tuple[str, str, str], tokens: int):
    case = make(names, tokens=tokens, hidden=288, experts=3)
    orders = torch.stack([shuffled(288, e) for e in range(3)])
    for isa in ISAS:
        with cases.running(isa, 2):
            found = case.run(input_orders=orders)
            # One expert after the other, each with the input in its order: the same sums.
            total = torch.zeros_like(case.x)
            for e in range(3):
                alone = replace(
                    case,
                    x=case.x[:, orders[e].long()].contiguous(),
                    ids=torch.where(case.ids == e, case.ids, -1).int(),
                )
                alone.run(total, accumulate=True)
            assert torch.equal(found, total), isa


def test_orders_of_one_expert_for_all_tokens():
    """As dense blocks are run."""
    case = make(("int8-g32",) * 3, tokens=40, experts=1, top_k=1)
    order = shuffled(96)
    with cases.running(ISAS[-1], 2):
        found = case.run(input_orders=order[None].contiguous())
        expected = replace(case, x=case.x[:, order.long()].contiguous()).run()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("which", ["routed", "shared", "both"])
def test_beside_shared_experts(which: str):
    """The same bits as in two ops, whichever of them has orders."""
    case = make(("int4-g32",) * 3, tokens=30, experts=3)
    other = replace(make(("int4-g32",) * 3, tokens=30, experts=1, top_k=1, seed=1), x=case.x)
    orders = torch.stack([shuffled(96, e) for e in range(3)]) if which != "shared" else None
    order = shuffled(96, 5)[None].contiguous() if which != "routed" else None
    bank = other.bank
    table = native.core.ExpertTable(
        other.ids, other.weights, bank.pointers,
        [(p.format_name, p.rows, p.cols, p.offset) for p in bank.projections], bank.activation,
        input_orders=order,
    )  # fmt: skip
    with cases.running(ISAS[-1], 2):
        found = case.run(input_orders=orders, shared=table)
        expected = case.run(input_orders=orders)
        other.run(expected, input_orders=order, accumulate=True)
    assert torch.equal(found, expected)


def test_orders_that_are_none():
    weight = cases.random_weight("int4-g32", 16, 64)
    x = torch.zeros(1, 64)
    for bad in (torch.full((64,), 64), torch.full((64,), -1), torch.zeros(63)):
        with pytest.raises(InvalidRequest, match="input_order"):
            cases.linear(weight, x, input_order=bad.int())
    case = make(("int4-g32",) * 3, tokens=1)
    for bad in (torch.full((5, 96), 96), torch.zeros(4, 96), torch.zeros(5, 95)):
        with pytest.raises(InvalidRequest, match="input_orders"):
            case.run(input_orders=bad.int())
    twice = torch.zeros(64, dtype=torch.int32)
    for order in (twice, torch.arange(64), torch.arange(63).int()):
        with pytest.raises(CheckpointError, match="order of the input channels"):
            PackedWeight(weight.format, 16, 64, weight.data, input_order=order)
    bank: ExpertBank = case.bank
    with pytest.raises(CheckpointError, match="order of the input channels"):
        bank.set_input_orders(torch.zeros(5, 96, dtype=torch.int32))

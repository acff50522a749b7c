"""The halves of the MoE operator: together the bits of the whole, however experts are divided."""

from __future__ import annotations

from dataclasses import dataclass

import packed_cases as cases
import pytest
import torch
from test_moe import Case, make
from torch import Tensor

from moestro import native
from moestro.core.errors import InvalidRequest
from moestro.devices.cpu.ops import CpuOps
from moestro.devices.emulated import EmulatedDevice
from moestro.devices.emulated.ops import EmulatedOps
from moestro.memory.expert_bank import ExpertBank
from moestro.memory.hybrid_bank import Crossing, HybridBank
from moestro.ops.contracts import ExpertBiases, Projection
from moestro.ops.reference import ReferenceOps

OPS = CpuOps()
ORACLE = ReferenceOps(torch.float64)
FORMATS = (("int4-g32",) * 3, ("k4", "k4", "k6"), ("int8-row",) * 3, ("iq2xs", "iq1m", "nvfp4"))


@dataclass
class Part:
    """Some of a bank's experts as a table; the others are elsewhere."""

    bank: ExpertBank
    here: list[int]

    def __post_init__(self) -> None:
        self.pointers = torch.zeros_like(self.bank.pointers)
        self.pointers[self.here] = self.bank.pointers[self.here]
        self.projections: tuple[Projection, ...] = self.bank.projections
        self.activation: str = self.bank.activation
        self.biases: ExpertBiases | None = self.bank.biases
        self.input_orders: Tensor | None = self.bank.input_orders

    def expert(self, index: int):
        assert index in self.here
        return self.bank.expert(index)


def divided(case: Case, seed: int, parts: int = 2) -> list[Part]:
    generator = torch.Generator().manual_seed(seed)
    where = torch.randint(parts, (case.bank.num_experts,), generator=generator)
    return [Part(case.bank, (where == part).nonzero()[:, 0].tolist()) for part in range(parts)]


def in_halves(case: Case, parts: list[Part], ops=OPS, out: Tensor | None = None) -> Tensor:
    """moe_slots of every part, and their sum; added to ``out`` if given."""
    tokens, top_k = case.ids.shape
    rows = cases.rows_of(tokens)
    y = torch.full((tokens, top_k, case.x.shape[1]), torch.nan)
    for part in parts:
        ops.moe_slots(case.x, case.ids, part, y, rows)
    result = torch.full_like(case.x, torch.nan) if out is None else out
    accumulate = out is not None
    ops.combine_experts(y, case.ids, case.weights, result, rows, accumulate=accumulate)
    return result


@pytest.mark.parametrize("tokens", [1, 3, 19, 140])
@pytest.mark.parametrize("names", FORMATS)
def test_same_bits_as_the_whole_for_any_division(names: tuple[str, str, str], tokens: int) -> None:
    case = make(names, tokens=tokens, hidden=256, inter=256, experts=9, top_k=3)
    start = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(3))
    start[:, ::3] = -0.0
    for threads in (1, 2):
        with cases.running(native.isa(), threads):
            expected, added = case.run(), case.run(out=start.clone(), accumulate=True)
            for seed in range(3):
                parts = divided(case, seed, parts=seed + 1)
                assert torch.equal(in_halves(case, parts), expected), seed
                found = in_halves(case, parts, out=start.clone())
                assert torch.equal(found.view(torch.int32), added.view(torch.int32)), seed


@pytest.mark.parametrize("isa", cases.ISAS)
@pytest.mark.parametrize("name", ["int4-g32", "k6", "f32", "bf16"])
def test_same_bits_as_the_whole_on_every_isa(isa: str, name: str) -> None:
    case = make((name,) * 3, tokens=21, hidden=100, inter=40, experts=7, biased=True, top_k=3)
    with cases.running(isa, 2):
        assert torch.equal(in_halves(case, divided(case, 1)), case.run())


@pytest.mark.parametrize("team", [(1, 1), (2, 1), (1, 1, 1, 1)])
def test_same_bits_as_the_whole_on_any_number_of_nodes(team: tuple[int, ...]) -> None:
    case = make(("int4-g32",) * 3, tokens=5, hidden=160, inter=96, experts=9)
    expected = case.run()
    nodes = [node for node, threads in enumerate(team) for _ in range(threads)]
    native.set_team(nodes, [()] * len(nodes), [0] * len(team))
    assert torch.equal(in_halves(case, divided(case, 2)), expected)


def test_channels_in_orders_of_their_own_and_an_expert_chosen_twice() -> None:
    case = make(("int4-g32",) * 3, tokens=9, experts=6, top_k=3)
    generator = torch.Generator().manual_seed(1)
    orders = torch.stack([torch.randperm(96, generator=generator) for _ in range(6)]).int()
    case.bank.set_input_orders(orders)
    case.ids[:, 2] = case.ids[:, 0]
    case.ids[4, 1] = -1
    assert torch.equal(in_halves(case, divided(case, 3)), case.run(input_orders=orders))


def test_a_bank_in_two_places_adds_biases_and_follows_orders() -> None:
    case = make(("int4-g32",) * 3, tokens=9, experts=6, top_k=3, biased=True)
    generator = torch.Generator().manual_seed(2)
    orders = torch.stack([torch.randperm(96, generator=generator) for _ in range(6)]).int()
    device = EmulatedDevice(ops=EmulatedOps(poison=True))
    biases, case.bank.biases = case.bank.biases, None
    assert biases is not None
    bank = HybridBank(case.bank, [1, 4], Crossing(device))
    results = []
    for ops, whole in ((OPS, case.bank), (device.ops, bank)):
        whole.set_biases(biases)
        whole.set_input_orders(orders)
        results.append(torch.zeros_like(case.x))
        whole.forward(ops, case.x, case.ids, case.weights, results[-1], cases.rows_of(9))
    assert torch.equal(*results)
    for expert in range(6):
        for mine, theirs in zip(bank.expert(expert), case.bank.expert(expert), strict=True):
            assert torch.equal(mine.unpack(), theirs.unpack())


def test_the_reference_agrees() -> None:
    case = make(("f32",) * 3, tokens=6, experts=5, top_k=3, biased=True, activation="gelu")
    case.ids[2] = -1
    case.ids[3, 1] = -1
    start = torch.ones_like(case.x)
    parts = divided(case, 4)
    mine, oracle = in_halves(case, parts, out=start.clone()), start.clone()
    ORACLE.moe(case.x, case.ids, case.weights, case.bank, oracle, cases.rows_of(6), accumulate=True)
    torch.testing.assert_close(mine, oracle, rtol=1e-5, atol=1e-5)
    halves = in_halves(case, parts, ops=ORACLE, out=start.clone())
    torch.testing.assert_close(halves, oracle, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ops", [OPS, ReferenceOps()])
def test_slots_of_experts_elsewhere_and_rows_beyond_are_left_alone(ops) -> None:
    case = make(("int4-g32",) * 3, tokens=8, experts=6, top_k=3)
    case.ids[1, 0] = -1
    part, other = divided(case, 5)
    y = torch.full((8, 3, 96), 7.0)
    rows = cases.rows_of(5)
    ops.moe_slots(case.x, case.ids, part, y, rows)
    here = torch.isin(case.ids, torch.tensor(part.here, dtype=torch.int32))
    here[5:] = False
    assert here.any() and not here[:5].all()
    assert (y[~here] == 7).all() and (y[here] != 7).any(-1).all()
    merged = torch.full_like(y, 9.0)
    ops.copy_slots(y, case.ids, part, merged, rows)
    assert torch.equal(merged[here], y[here]) and (merged[~here] == 9).all()
    ops.copy_slots(y, case.ids, other, merged, rows)
    named = (case.ids >= 0) & (torch.arange(8)[:, None] < 5)
    assert torch.equal(merged[named], y[named]) and (merged[~named] == 9).all()


@pytest.mark.parametrize("ops", [OPS, ReferenceOps()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bfloat16, torch.uint8])
def test_copy_rows(ops, dtype: torch.dtype) -> None:
    x = torch.arange(5 * 7).view(5, 7).to(dtype)
    out = torch.full_like(x, 99)
    ops.copy_rows(x, out, cases.rows_of(3))
    assert torch.equal(out[:3], x[:3]) and (out[3:] == 99).all()


def test_what_does_not_fit_together_is_refused() -> None:
    case = make(("int4-g32",) * 3, tokens=4, experts=5, top_k=2)
    rows, y = cases.rows_of(4), torch.zeros(4, 2, 96)
    with pytest.raises(InvalidRequest, match="slots of a row is 3, expected 2"):
        OPS.moe_slots(case.x, case.ids, case.bank, torch.zeros(4, 3, 96), rows)
    with pytest.raises(InvalidRequest, match="width of slots is 95, expected 96"):
        OPS.moe_slots(case.x, case.ids, case.bank, torch.zeros(4, 2, 95), rows)
    with pytest.raises(InvalidRequest, match="out width is 95, expected 96"):
        OPS.combine_experts(y, case.ids, case.weights, torch.zeros(4, 95), rows)
    with pytest.raises(InvalidRequest, match="different types"):
        OPS.copy_rows(case.x, case.x.double(), rows)
    with pytest.raises(InvalidRequest, match="row count 5 is outside"):
        OPS.copy_slots(y, case.ids, case.bank, y.clone(), cases.rows_of(5))
    case.ids[3, 1] = 5
    for ops in (OPS, ReferenceOps()):
        with pytest.raises(InvalidRequest, match="expert id 5"):
            ops.moe_slots(case.x, case.ids, case.bank, y, rows)
        with pytest.raises(InvalidRequest, match="expert id 5"):
            ops.copy_slots(y, case.ids, case.bank, y.clone(), rows)

"""The MoE operator: every format x every instruction set, bits, values, routing edges."""

from __future__ import annotations

from dataclasses import dataclass

import packed_cases as cases
import pytest
import torch
from torch import Tensor

from moestro import formats, native
from moestro.core.errors import InvalidRequest, UnsupportedOp
from moestro.memory.expert_bank import BlobLayout, ExpertBank

ISAS = native.supported_isas()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A bank of experts and one batch for it."""

    bank: ExpertBank
    x: Tensor
    ids: Tensor
    weights: Tensor

    def run(
        self, out: Tensor | None = None, rows: slice = slice(None), **options: object
    ) -> Tensor:
        x = self.x[rows].contiguous()
        result = torch.zeros_like(x) if out is None else out
        native.core.moe(
            None, x, self.ids[rows].contiguous(), self.weights[rows].contiguous(),
            self.bank.pointers,
            [(p.format_name, p.rows, p.cols, p.offset) for p in self.bank.projections], "silu",
            result, cases.rows_of(x.shape[0]), **options,
        )  # fmt: skip
        return result

    def expected(self) -> Tensor:
        """Float64, with the integer core's rounding of activations before both products."""
        out = torch.zeros_like(self.x, dtype=torch.float64)
        for t in range(self.x.shape[0]):
            for a in self.ids[t].argsort(stable=True).tolist():
                if self.ids[t, a] < 0:
                    continue
                gate, up, down = self.bank.expert(int(self.ids[t, a]))
                row = self.x[t : t + 1]
                g = cases.multiplied(gate.format_name, row) @ gate.unpack().double().T
                u = cases.multiplied(up.format_name, row) @ up.unpack().double().T
                h = (g / (1 + torch.exp(-g)) * u).float()
                y = cases.multiplied(down.format_name, h) @ down.unpack().double().T
                out[t] += float(self.weights[t, a]) * y[0]
        return out


def make(
    names: tuple[str, str, str],
    *,
    tokens: int,
    hidden: int = 96,
    inter: int = 64,
    experts: int = 5,
    top_k: int = 2,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(inter, hidden), (inter, hidden), (hidden, inter)]
    parts = [(n, r, c) for n, (r, c) in zip(names, shapes, strict=True)]
    bank = ExpertBank(BlobLayout.plan(parts), experts)
    for e in range(experts):
        packed = [
            formats.get(n).pack(torch.randn(r, c, generator=generator) / c**0.5)
            for n, r, c in parts
        ]
        bank.layout.fill(bank.blob(e), packed)
    scores = torch.rand(tokens, experts, generator=generator)
    weights, ids = scores.topk(top_k, dim=1)
    return Case(
        bank=bank,
        x=torch.randn(tokens, hidden, generator=generator),
        ids=ids.int(),
        weights=weights,
    )


def close(found: Tensor, exact: Tensor, tolerance: float) -> bool:
    return float((found.double() - exact).abs().max()) <= tolerance * float(exact.abs().max())


@pytest.mark.parametrize("name", cases.FORMATS)
def test_same_bits_for_every_isa_thread_count_and_batch(name: str) -> None:
    case = make((name, name, name), tokens=23)
    with cases.running("scalar", 1):
        expected = case.run()
    for isa in ISAS:
        for threads in (1, 2):
            with cases.running(isa, threads):
                assert torch.equal(case.run(), expected), (isa, threads)
        with cases.running(isa, 2):
            alone = [case.run(rows=slice(t, t + 1)) for t in range(23)]
        assert torch.equal(torch.cat(alone), expected), isa


@pytest.mark.parametrize("name", cases.FORMATS)
def test_values_against_float64(name: str) -> None:
    case = make((name, name, name), tokens=4)
    # a value near a rounding boundary of h may fall to the other side: one step of 127
    tolerance = 1e-6 if formats.get(name).is_float else 2e-3
    assert close(case.run(), case.expected(), tolerance)


@pytest.mark.parametrize("isa", ISAS)
def test_formats_may_differ_between_gate_up_and_down(isa: str) -> None:
    """As in files that keep some down projections at more bits (two-step and minimum formats)."""
    for names in (("int4-g32", "k4", "k6"), ("f32", "int8-g32", "bf16"), ("k4", "k4", "k6")):
        case = make(names, tokens=7, hidden=256, inter=256)
        with cases.running("scalar", 1):
            expected = case.run()
        with cases.running(isa, 2):
            assert torch.equal(case.run(), expected)
        assert close(expected, case.expected(), 2e-3)


@pytest.mark.parametrize(("hidden", "inter"), [(33, 17), (40, 100), (7, 1), (130, 31)])
def test_odd_sizes(hidden: int, inter: int) -> None:
    for name in ("int4-g32", "int8-row", "k6", "f32"):
        case = make((name, name, name), tokens=3, hidden=hidden, inter=inter)
        tolerance = 1e-6 if name == "f32" else 1e-2
        assert close(case.run(), case.expected(), tolerance), name


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 300])
def test_all_tokens_to_one_expert(isa: str, tokens: int) -> None:
    case = make(("int4-g32", "int4-g32", "int4-g32"), tokens=tokens, top_k=1)
    case.ids.fill_(3)
    with cases.running(isa, 2):
        out = case.run()
        assert torch.equal(case.run(rows=slice(tokens - 1, tokens))[0], out[-1])
    with cases.running("scalar", 1):
        assert torch.equal(case.run(rows=slice(0, 2)), out[:2])


def test_negative_ids_are_skipped() -> None:
    case = make(("int4-g32",) * 3, tokens=6, top_k=3)
    case.ids[0] = -1
    case.ids[1, 0] = -5
    case.ids[4, 2] = -1
    out = case.run(out=torch.full_like(case.x, 9.0))
    assert bool((out[0] == 0).all())
    assert close(out, case.expected(), 2e-3)


def test_no_live_rows_and_rows_beyond_are_untouched() -> None:
    case = make(("int4-g32",) * 3, tokens=4)
    out = torch.full_like(case.x, 9.0)
    projections = [(p.format_name, p.rows, p.cols, p.offset) for p in case.bank.projections]
    for live in (0, 2):
        native.core.moe(
            None, case.x, case.ids, case.weights, case.bank.pointers, projections, "silu", out,
            cases.rows_of(live),
        )  # fmt: skip
        assert bool((out[live:] == 9.0).all())


def test_accumulate_adds_experts_in_ascending_order_to_the_row() -> None:
    case = make(("int8-g32",) * 3, tokens=5)
    start = torch.randn_like(case.x)
    out = case.run(out=start.clone(), accumulate=True)
    # the order of a token's slots does not matter, only the ids do
    flipped = Case(
        bank=case.bank, x=case.x, ids=case.ids.flip(1).contiguous(),
        weights=case.weights.flip(1).contiguous(),
    )  # fmt: skip
    assert torch.equal(flipped.run(out=start.clone(), accumulate=True), out)
    assert close(out, start.double() + case.expected(), 2e-3)


def test_the_same_expert_twice() -> None:
    case = make(("int8-g32",) * 3, tokens=3)
    case.ids[:, 1] = case.ids[:, 0]
    assert close(case.run(), case.expected(), 2e-3)


def test_pointers_are_read_when_the_op_runs() -> None:
    """Residency may change between replays of a recorded program."""
    case = make(("int4-g32",) * 3, tokens=2)
    projections = [(p.format_name, p.rows, p.cols, p.offset) for p in case.bank.projections]
    program, out = native.Program(), torch.zeros_like(case.x)
    native.core.moe(
        program, case.x, case.ids, case.weights, case.bank.pointers, projections, "silu", out,
        cases.rows_of(2),
    )  # fmt: skip
    program.replay()
    first, moved = out.clone(), case.bank.buffer.clone()
    case.bank.pointers += moved.data_ptr() - case.bank.buffer.data_ptr()
    case.bank.buffer.zero_()
    program.replay()
    assert torch.equal(out, first)
    case.bank.pointers[int(case.ids[0, 0])] = 0
    with pytest.raises(InvalidRequest, match="not in memory"):
        program.replay()


def test_wrong_arguments_are_refused() -> None:
    case = make(("int4-g32",) * 3, tokens=2)
    case.ids[1, 1] = 5
    with pytest.raises(InvalidRequest, match="expert id 5 at row 1"):
        case.run()
    projections = [(p.format_name, p.rows, p.cols, p.offset) for p in case.bank.projections]
    arguments = (case.x, case.ids, case.weights, case.bank.pointers)
    with pytest.raises(UnsupportedOp, match="gelu"):
        native.core.moe(
            None, *arguments, projections, "gelu", torch.zeros_like(case.x), cases.rows_of(2)
        )
    with pytest.raises(InvalidRequest, match="down output channels"):
        wrong = [*projections[:2], ("int4-g32", 95, 64, 0)]
        native.core.moe(None, *arguments, wrong, "silu", torch.zeros_like(case.x), cases.rows_of(2))

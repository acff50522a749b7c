"""The MoE operator: every format x every instruction set, bits, values, routing edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import packed_cases as cases
import pytest
import torch
from torch import Tensor

from moestro import formats, native
from moestro.core.errors import InvalidRequest, UnsupportedOp
from moestro.memory.expert_bank import BlobLayout, ExpertBank
from moestro.ops.contracts import ACTIVATIONS, ExpertBiases

ISAS = cases.ISAS


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


#: each activation's formula in the dtype of its arguments
GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: gate / (1 + torch.exp(-gate)) * up,
    "gelu": lambda gate, up: gate * torch.special.ndtr(gate) * up,
    "gelu_tanh": lambda gate, up: torch.nn.functional.gelu(gate, approximate="tanh") * up,
    "relu": lambda gate, up: gate.clamp(min=0) * up,
    "swiglu_oai": clamped_swiglu,
}


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
        if (biases := self.bank.biases) is not None:
            options |= {
                "gate_bias": biases.gate, "up_bias": biases.up, "down_bias": biases.down
            }  # fmt: skip
        native.core.moe(
            None, x, self.ids[rows].contiguous(), self.weights[rows].contiguous(),
            self.bank.pointers,
            [(p.format_name, p.rows, p.cols, p.offset) for p in self.bank.projections],
            self.bank.activation, result, cases.rows_of(x.shape[0]), **options,
        )  # fmt: skip
        return result

    def expected(self) -> Tensor:
        """Float64, with the integer core's rounding of activations before both products."""
        out = torch.zeros_like(self.x, dtype=torch.float64)
        for t in range(self.x.shape[0]):
            for a in self.ids[t].argsort(stable=True).tolist():
                if self.ids[t, a] < 0:
                    continue
                e, biases = int(self.ids[t, a]), self.bank.biases
                gate, up, down = self.bank.expert(e)
                row = self.x[t : t + 1]
                g = cases.multiplied(gate.format_name, row) @ gate.unpack().double().T
                u = cases.multiplied(up.format_name, row) @ up.unpack().double().T
                if biases is not None:
                    g, u = g + biases.gate[e], u + biases.up[e]
                h = GATES[self.bank.activation](g, u).float()
                y = cases.multiplied(down.format_name, h) @ down.unpack().double().T
                if biases is not None:
                    y = y + biases.down[e]
                out[t] += float(self.weights[t, a]) * y[0]
        return out


def packed_part(name: str, rows: int, cols: int, generator: torch.Generator) -> Tensor:
    if formats.get(name).quantizes:
        return formats.get(name).pack(torch.randn(rows, cols, generator=generator) / cols**0.5)
    seed = int(torch.randint(1 << 30, (), generator=generator))
    return cases.random_weight(name, rows, cols, seed).data


def make(
    names: tuple[str, str, str],
    *,
    tokens: int,
    hidden: int = 96,
    inter: int = 64,
    experts: int = 5,
    top_k: int = 2,
    seed: int = 0,
    activation: str = "silu",
    biased: bool = False,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(inter, hidden), (inter, hidden), (hidden, inter)]
    parts = [(n, r, c) for n, (r, c) in zip(names, shapes, strict=True)]
    bank = ExpertBank(BlobLayout.plan(parts), experts, activation=activation)
    for e in range(experts):
        packed = [packed_part(n, r, c, generator) for n, r, c in parts]
        bank.layout.fill(bank.blob(e), packed)
    if biased:
        gate, up, down = (torch.randn(experts, r, generator=generator) for r, _ in shapes)
        bank.set_biases(ExpertBiases(gate=3 * gate, up=3 * up, down=down))
    scores = torch.rand(tokens, experts, generator=generator)
    weights, ids = scores.topk(top_k, dim=1)
    return Case(
        bank=bank,
        x=torch.randn(tokens, hidden, generator=generator),
        ids=ids.int(),
        weights=weights,
    )


@pytest.mark.parametrize("tokens", [1, 7, 130])
@pytest.mark.parametrize(
    "names", [("int4-g32", "int4-g32", "int4-g32"), ("k4", "k4", "k6"), ("f32", "f32", "f32")]
)
def test_same_bits_on_any_number_of_nodes(names: tuple[str, str, str], tokens: int) -> None:
    for hidden, inter in ((160, 96), (32, 40)):  # the second has fewer channels than nodes
        case = make(names, tokens=tokens, hidden=hidden, inter=inter)
        with cases.running(native.isa(), 1):
            expected = case.run()
            for team in ((2,), (1, 1), (2, 1), (1, 1, 1, 1), (2, 2, 2, 2)):
                nodes = [node for node, threads in enumerate(team) for _ in range(threads)]
                native.set_team(nodes, [()] * len(nodes), [0] * len(team))
                assert torch.equal(case.run(), expected), team


def close(found: Tensor, exact: Tensor, tolerance: float) -> bool:
    return float((found.double() - exact).abs().max()) <= tolerance * float(exact.abs().max())


@pytest.mark.parametrize("name", cases.FORMATS)
def test_same_bits_for_every_isa_thread_count_and_batch(name: str) -> None:
    case = make((name, name, name), tokens=23)
    for isa in ISAS:
        with cases.running(cases.reference_isa(isa, name), 1):
            expected = case.run()
        for threads in (1, 2):
            with cases.running(isa, threads):
                assert torch.equal(case.run(), expected), (isa, threads)
        with cases.running(isa, 2):
            alone = [case.run(rows=slice(t, t + 1)) for t in range(23)]
        assert torch.equal(torch.cat(alone), expected), isa


@pytest.mark.parametrize("name", cases.FORMATS)
def test_values_against_float64(name: str) -> None:
    case = make((name, name, name), tokens=4)
    # a value near a rounding boundary of h may fall to the other side: one step of 127, or of
    # bfloat16's 256
    exact = formats.get(name).is_float and not cases.multiplies_pairs(native.isa(), name)
    tolerance = 1e-6 if exact else 2e-3
    assert close(case.run(), case.expected(), tolerance)


@pytest.mark.parametrize("isa", ISAS)
def test_formats_may_differ_between_gate_up_and_down(isa: str) -> None:
    """As in files that keep some down projections at more bits (two-step and minimum formats)."""
    for names in (
        ("int4-g32", "k4", "k6"),
        ("f32", "int8-g32", "bf16"),
        ("k4", "k4", "k6"),
        ("k2", "k2", "k3"),
        ("k3", "k4nl", "k5"),
        ("mxfp4", "int5-g32", "int5m-g32"),
        ("f16", "bf16", "fp8-g64"),
        ("fp8-g128", "f32", "f16"),
        ("iq2xs", "iq1m", "nvfp4"),
    ):
        case = make(names, tokens=7, hidden=256, inter=256)
        with cases.running(cases.reference_isa(isa, *names), 1):
            expected = case.run()
        with cases.running(isa, 2):
            assert torch.equal(case.run(), expected)
        with cases.running(isa, 1):
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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("names", [("int4-g32",) * 3, ("k4", "k4", "k6"), ("int8-row",) * 3])
def test_skewed_routing(names: tuple[str, str, str], isa: str) -> None:
    """One expert sees every token, others a tile, a tile and one, one token, or none."""
    case = make(names, tokens=80, hidden=96, inter=48, top_k=2)
    case.ids[:, 0] = 2
    case.ids[:, 1] = -1
    case.ids[3:19, 1] = 0
    case.ids[20:70:3, 1] = 3
    case.ids[79, 1] = 4
    with cases.running("scalar", 1):
        alone = torch.cat([case.run(rows=slice(t, t + 1)) for t in range(80)])
    with cases.running(isa, 2):
        assert torch.equal(case.run(), alone)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("hidden", [5, 32])
def test_one_task_for_all_output_channels_of_many_tokens(hidden: int, accumulate: bool) -> None:
    case = make(("f32",) * 3, tokens=40, hidden=hidden)
    start = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(1))
    expected = case.expected() + (start if accumulate else 0)
    assert close(case.run(out=start.clone(), accumulate=accumulate), expected, 1e-6)


def test_every_activation_is_here() -> None:
    assert tuple(GATES) == ACTIVATIONS


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_biases(activation: str, biased: bool) -> None:
    """Ragged channels (40 = 32 + 8, 100), so that the last block of a bias is a partial one."""
    for name, tolerance in (("f32", 1e-6), ("int4-g32", 5e-3), ("k6", 5e-3)):
        case = make(
            (name,) * 3, tokens=19, hidden=100, inter=40, activation=activation, biased=biased
        )
        case.x.mul_(4)  # so that clamps are met
        with cases.running("scalar", 1):
            expected = case.run()
        assert close(expected, case.expected(), tolerance), name
        for isa in ISAS:
            with cases.running(isa, 2):
                assert torch.equal(case.run(), expected) or formats.get(name).is_float, (name, isa)
                alone = [case.run(rows=slice(t, t + 1)) for t in range(19)]
                assert torch.equal(torch.cat(alone), case.run()), (name, isa)
        assert not torch.equal(make((name,) * 3, tokens=19, hidden=100, inter=40).run(), expected)


def one_gate(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """act(gate, up) of every pair, through experts of one channel whose weights are one."""
    parts = [("f32", 1, 1)] * 3
    bank = ExpertBank(BlobLayout.plan(parts), len(gate), activation=activation)
    one = formats.get("f32").pack(torch.ones(1, 1))
    for e in range(len(gate)):
        bank.layout.fill(bank.blob(e), [one] * 3)
    bank.set_biases(
        ExpertBiases(gate=gate[:, None], up=up[:, None], down=torch.zeros(len(gate), 1))
    )
    case = Case(
        bank=bank,
        x=torch.zeros(len(gate), 1),
        ids=torch.arange(len(gate), dtype=torch.int32)[:, None],
        weights=torch.ones(len(gate), 1),
    )
    return case.run()[:, 0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_over_their_range(activation: str) -> None:
    """Float64 to 2e-6 of the result from -6 up, in the tail below by its absolute size; NaN stays,
    and all instruction sets agree to the last bit."""
    gate = torch.cat([torch.linspace(-30, 30, 301), torch.tensor([0.0, 1e-30, -1e-6, 6.9999, 7.0])])
    up = torch.linspace(-9, 9, len(gate))[torch.randperm(len(gate))]
    with cases.running("scalar", 1):
        found = one_gate(activation, gate, up)
    exact = GATES[activation](gate.double(), up.double())
    error = (found.double() - exact).abs()
    assert bool((error <= 2e-6 * exact.abs() + 1e-8 * (gate < -6)).all())
    for isa in ISAS:
        with cases.running(isa, 1):
            assert torch.equal(one_gate(activation, gate, up), found), isa
            odd = torch.tensor([torch.nan, 1.0, 3e38, -3e38])
            result = one_gate(activation, odd, odd.flip(0))
            assert result[0].isnan() and result[3].isnan() and not result[1].isnan(), isa


def test_biases_of_the_wrong_shape_are_refused() -> None:
    case = make(("f32",) * 3, tokens=2)
    for name, experts, channels in (("gate", 5, 63), ("up", 4, 64), ("down", 5, 64)):
        wrong = {f"{name}_bias": torch.zeros(experts, channels)}
        with pytest.raises(InvalidRequest, match=rf"moe: {name}_bias (experts|channels) is"):
            case.run(**wrong)


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
    with pytest.raises(UnsupportedOp, match="activation relu2; known: silu, gelu, gelu_tanh, relu"):
        native.core.moe(
            None, *arguments, projections, "relu2", torch.zeros_like(case.x), cases.rows_of(2)
        )
    with pytest.raises(InvalidRequest, match="down output channels"):
        wrong = [*projections[:2], ("int4-g32", 95, 64, 0)]
        native.core.moe(None, *arguments, wrong, "silu", torch.zeros_like(case.x), cases.rows_of(2))


@pytest.mark.parametrize(
    ("routed", "other"), [("int4-g32", "int4-g32"), ("k4", "int8-g64"), ("bf16", "k6")]
)
@pytest.mark.parametrize("tokens", [1, 7, 130])
def test_shared_experts_inside_the_op_equal_a_second_op(routed: str, other: str, tokens: int):
    """Other format, width and activation; own weights; the bits of one after the other."""
    case = make((routed,) * 3, tokens=tokens)
    beside = make(
        (other,) * 3, tokens=tokens, inter=100, experts=2, top_k=2, activation="gelu", biased=True,
        seed=1,
    )  # fmt: skip
    beside.ids[::3, 1] = -1
    bank, biases = beside.bank, beside.bank.biases
    assert biases is not None
    for isa in ISAS:
        native.set_isa(isa)
        first = case.run()
        want = Case(bank=bank, x=case.x, ids=beside.ids, weights=beside.weights).run(
            out=first.clone(), accumulate=True
        )
        shared = native.core.ExpertTable(
            beside.ids, beside.weights, bank.pointers,
            [(p.format_name, p.rows, p.cols, p.offset) for p in bank.projections], bank.activation,
            gate_bias=biases.gate, up_bias=biases.up, down_bias=biases.down,
        )  # fmt: skip
        assert torch.equal(case.run(shared=shared), want), isa
        assert not torch.equal(want, first)


def test_shared_experts_of_another_width_are_refused():
    case, wrong = make(("int4-g32",) * 3, tokens=2), make(("int4-g32",) * 3, tokens=2, hidden=64)
    shared = native.core.ExpertTable(
        wrong.ids, wrong.weights, wrong.bank.pointers,
        [(p.format_name, p.rows, p.cols, p.offset) for p in wrong.bank.projections], "silu",
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match="gate input channels is 64, expected 96"):
        case.run(shared=shared)

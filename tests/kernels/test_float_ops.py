"""Float row ops: against the float64 reference, and the same bits on every instruction set."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from packed_cases import rows_of
from torch import Tensor

from moestro import _core as core
from moestro import native
from moestro.core.errors import InvalidRequest, UnsupportedOp
from moestro.devices.cpu.ops import CpuOps
from moestro.ops.reference import ReferenceOps

WIDTHS = [*range(1, 41), 64, 100, 127, 128, 130, 1000, 5000]
EXTREMES = [0.0, -0.0, 1.0, -1.0, 1e30, -1e30, 3e38, -3e38, 1e-40, -1e-40, 87.5, -87.5, 88.73]
EXTREMES += [-88.73, 104.0, -104.0, 1e-7, torch.inf, -torch.inf, torch.nan]

OPS = CpuOps()
ORACLE = ReferenceOps(torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def extreme(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers with every fifth element an extreme one."""
    x = normal(*shape, seed=seed)
    flat = x.view(-1)
    flat[::5] = torch.tensor(EXTREMES).repeat(len(flat) // 5 // len(EXTREMES) + 1)[: len(flat[::5])]
    return x


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal bit by bit, the sign of zero too; NaN equals NaN of any payload."""
    nan = x.isnan()
    bits = torch.equal(x.view(torch.int32)[~nan], y.view(torch.int32)[~nan])
    return bits and torch.equal(nan, y.isnan())


def require_same_on_all(run: Callable[[], Tensor]) -> Tensor:
    """The result of ``run`` on every instruction set and on 3 threads, required to be one."""
    results = {}
    native.set_threads(1)
    for isa in native.supported_isas():
        native.set_isa(isa)
        results[isa] = run()
    native.set_threads(3)
    results["3 threads"] = run()
    first = next(iter(results.values()))
    differing = [key for key, result in results.items() if not same_bits(first, result)]
    assert not differing
    return first


def test_exp_is_within_one_ulp_and_the_same_everywhere():
    x = torch.linspace(-106.0, 90.0, 500_003)[None]

    def run() -> Tensor:
        y = x.clone()
        core.exp(None, y, rows_of(1))
        return y

    found = require_same_on_all(run).double().numpy()
    true = np.exp(x.double().numpy())
    with np.errstate(over="ignore"):
        rounded = true.astype(np.float32)
    finite = np.isfinite(rounded)
    assert np.isinf(found[~finite]).all()
    ulp = np.spacing(rounded[finite]).astype(np.float64)
    assert (np.abs(found[finite] - true[finite]) / ulp).max() < 1.0


def test_exp_at_the_edges():
    x = torch.tensor([[-torch.inf, torch.inf, torch.nan, 0.0, -0.0, 1e30, -1e30, -104.0, 1e-45]])
    core.exp(None, x, rows_of(1))
    assert x[0, [0, 1, 3, 4, 5, 6, 7, 8]].tolist() == [0, torch.inf, 1, 1, torch.inf, 0, 0, 1]
    assert x[0, 2].isnan()


@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul_and_sigmoid(width: int):
    gate, up = normal(3, width, seed=1), normal(3, width, seed=2)
    mine, oracle = torch.empty_like(gate), torch.empty_like(gate)
    OPS.silu_mul(gate, up, mine, rows_of(3))
    ORACLE.silu_mul(gate, up, oracle, rows_of(3))
    torch.testing.assert_close(mine, oracle, rtol=5e-7, atol=1e-35)
    mine, oracle = gate.clone(), gate.clone()
    OPS.sigmoid(mine, rows_of(3))
    ORACLE.sigmoid(oracle, rows_of(3))
    torch.testing.assert_close(mine, oracle, rtol=5e-7, atol=0)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("make", [normal, extreme])
def test_elementwise_bits(width: int, make: Callable[..., Tensor]):
    gate, up = make(5, width, seed=3), make(5, width, seed=4)

    def silu_mul() -> Tensor:
        out = torch.empty_like(gate)
        OPS.silu_mul(gate, up, out, rows_of(5))
        return out

    def sigmoid() -> Tensor:
        x = gate.clone()
        OPS.sigmoid(x, rows_of(5))
        return x

    require_same_on_all(silu_mul)
    require_same_on_all(sigmoid)


def test_silu_is_finite_for_finite_numbers():
    finite = [x for x in EXTREMES if abs(x) < torch.inf]
    gate = torch.tensor([finite])
    out = torch.empty_like(gate)
    OPS.silu_mul(gate, torch.ones_like(gate), out, rows_of(1))
    assert out.isfinite().all()
    torch.testing.assert_close(
        out, torch.nn.functional.silu(gate.double()).float(), rtol=1e-6, atol=1e-35
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rmsnorm(width: int, with_residual: bool):
    x, weight = normal(4, width, seed=5), normal(width, seed=6)
    residual = normal(4, width, seed=7) if with_residual else None

    def run(ops: CpuOps | ReferenceOps) -> Tensor:
        out = torch.zeros_like(x)
        added = None if residual is None else residual.clone()
        ops.rmsnorm(x, weight, out, rows_of(3), eps=1e-6, residual=added)
        return out if added is None else torch.cat([out, added])

    mine = require_same_on_all(lambda: run(OPS))
    torch.testing.assert_close(mine, run(ORACLE), rtol=2e-6, atol=1e-7)
    assert not mine[3].any()


@pytest.mark.parametrize("head_dim", [1, 15, 16, 40, 128])
def test_rmsnorm_of_groups_in_place(head_dim: int):
    x, weight = normal(3, 4 * head_dim, seed=8), normal(head_dim, seed=9)
    mine, oracle = x.clone(), x.clone()
    OPS.rmsnorm(mine, weight, mine, rows_of(3), eps=1e-5, groups=4)
    ORACLE.rmsnorm(oracle, weight, oracle, rows_of(3), eps=1e-5, groups=4)
    torch.testing.assert_close(mine, oracle, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary"), [(2, 2), (7, 4), (16, 16), (33, 32), (64, 64), (80, 34), (128, 128)]
)
def test_rope(head_dim: int, rotary: int, interleaved: bool):
    x, heads = normal(6, 3 * head_dim, seed=10), 3
    angle = normal(50, rotary // 2, seed=11)
    positions = torch.tensor([0, 49, 7, 7, 12, 3], dtype=torch.int32)

    def run(ops: CpuOps | ReferenceOps) -> Tensor:
        turned = x.clone()
        ops.rope(
            turned,
            positions,
            angle.cos(),
            angle.sin(),
            rows_of(5),
            heads=heads,
            interleaved=interleaved,
        )
        return turned

    mine = require_same_on_all(lambda: run(OPS))
    torch.testing.assert_close(mine, run(ORACLE), rtol=0, atol=2e-6)
    assert torch.equal(mine[5], x[5])
    if rotary < head_dim:
        by_head = mine.view(6, heads, head_dim)
        assert torch.equal(by_head[..., rotary:], x.view(6, heads, head_dim)[..., rotary:])


@pytest.mark.parametrize("bad", [-1, 8])
def test_rope_refuses_positions_before_it_turns_anything(bad: int):
    x, table = normal(3, 8, seed=12), normal(8, 4, seed=13)
    positions = torch.tensor([0, 1, bad], dtype=torch.int32)
    native.set_threads(2)
    before = x.clone()
    with pytest.raises(InvalidRequest, match=rf"position {bad} of row 2 is outside 0\.\.7"):
        OPS.rope(x, positions, table, table, rows_of(3), heads=1)
    assert torch.equal(x, before)


@pytest.mark.parametrize("width", [1, 17, 256])
def test_gather_rows(width: int):
    x = normal(9, width, seed=14)
    indices = torch.tensor([8, 0, 3, 3, 100], dtype=torch.int32)
    out = torch.zeros(5, width)
    OPS.gather_rows(x, indices, out, rows_of(4))
    assert torch.equal(out[:4], x[[8, 0, 3, 3]])
    assert not out[4].any()
    with pytest.raises(InvalidRequest, match=r"index 100 of row 4 is outside 0\.\.8"):
        OPS.gather_rows(x, indices, out, rows_of(5))


def route(
    ops: CpuOps | ReferenceOps, logits: Tensor, top_k: int, normalize: bool
) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(logits.shape[0], top_k, dtype=torch.int32)
    weights = torch.zeros(logits.shape[0], top_k)
    ops.route(logits, ids, weights, rows_of(logits.shape[0]), normalize=normalize)
    return ids, weights


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("experts", "top_k"), [(1, 1), (4, 2), (8, 8), (60, 4), (128, 8), (1024, 10), (1500, 32)]
)
def test_route(experts: int, top_k: int, normalize: bool):
    logits = normal(7, experts, seed=15)

    def run() -> Tensor:
        ids, weights = route(OPS, logits, top_k, normalize)
        return torch.cat([ids.float(), weights])

    mine = require_same_on_all(run)
    ids, weights = route(ORACLE, logits, top_k, normalize)
    assert torch.equal(mine[:7].int(), ids)
    torch.testing.assert_close(mine[7:], weights, rtol=1e-6, atol=1e-12)


def test_route_prefers_the_lower_id_of_equals():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, -torch.inf], [3.0] * 6, [-1e30] * 5 + [1e30]])
    ids, weights = route(OPS, logits, 3, True)
    assert ids.tolist() == [[1, 2, 3], [0, 1, 2], [5, 0, 1]]
    assert weights[1].tolist() == pytest.approx([1 / 3] * 3)
    assert weights[2].tolist() == [1, 0, 0]


@pytest.mark.parametrize("bad", [[torch.nan, 0.0], [0.0, torch.nan], [torch.inf, 0.0]])
def test_route_refuses_what_has_no_softmax(bad: list[float]):
    logits = torch.zeros(4, 40)
    logits[2, 17:19] = torch.tensor(bad)
    with pytest.raises(InvalidRequest, match="logits of row 2"):
        route(OPS, logits, 2, True)
    with pytest.raises(InvalidRequest, match="logits of row 0"):
        route(OPS, torch.full((1, 4), -torch.inf), 2, True)


def test_route_refuses_more_than_there_are():
    with pytest.raises(UnsupportedOp, match="top 5 of 4 experts"):
        route(OPS, torch.zeros(1, 4), 5, True)


def test_rows_beyond_the_live_ones_are_untouched():
    x = normal(4, 40, seed=16)
    out = torch.full_like(x, 7.0)
    OPS.silu_mul(x, x, out, rows_of(2))
    assert (out[2:] == 7).all()
    assert not (out[:2] == 7).any()
    OPS.silu_mul(x, x, out, rows_of(0))
    with pytest.raises(InvalidRequest, match=r"row count 5 is outside 0\.\.4"):
        OPS.silu_mul(x, x, out, rows_of(5))
    with pytest.raises(InvalidRequest, match="row count -1"):
        OPS.sigmoid(x, rows_of(-1))


def test_shapes_are_checked():
    x = normal(4, 8)
    with pytest.raises(InvalidRequest, match="silu_mul: width is 7, expected 8"):
        OPS.silu_mul(x, x, torch.zeros(4, 7), rows_of(1))
    with pytest.raises(InvalidRequest, match="rmsnorm: groups 3 does not divide 8"):
        OPS.rmsnorm(x, torch.ones(8), x, rows_of(1), eps=1e-6, groups=3)
    with pytest.raises(InvalidRequest, match="rope: 10 rotary channels exceed head_dim 8"):
        OPS.rope(x, torch.zeros(4).int(), torch.ones(3, 5), torch.ones(3, 5), rows_of(1), heads=1)
    with pytest.raises(InvalidRequest, match="gather_rows: out width"):
        OPS.gather_rows(x, torch.zeros(4).int(), torch.zeros(4, 9), rows_of(1))


def test_nothing_is_converted_to_fit():
    x = normal(4, 8)
    with pytest.raises(TypeError):  # not contiguous: the result would land in a copy
        OPS.sigmoid(torch.zeros(4, 16)[:, ::2], rows_of(4))
    with pytest.raises(TypeError):
        OPS.sigmoid(x.double(), rows_of(4))
    with pytest.raises(TypeError):
        OPS.sigmoid(x, torch.tensor([4]))

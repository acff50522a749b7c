"""Products of packed matrices on the accelerator: the CPU's bits, values, rows left alone."""

from __future__ import annotations

import packed_cases as cases
import pytest
import torch
from gpu_cases import is_float, moved, rows_of, seen, unwritten
from torch import Tensor

from moestro.core.errors import InvalidRequest, UnsupportedFormat, UnsupportedOp
from moestro.devices.cuda import formats as tile_formats
from moestro.devices.cuda.launches import FEW_ROWS
from moestro.devices.cuda.ops import CudaOps
from moestro.formats.base import PackedWeight
from moestro.ops.dispatch import OP_NAMES

#: one group size of each family, and all of one
NAMES = [
    name
    for name in tile_formats.names()
    if "-" not in name or name.endswith("-g32") or name.startswith("int4-")
]
MANY = FEW_ROWS + 2


def product(
    ops: CudaOps, place: torch.device, weight: PackedWeight, x: Tensor, **options: object
) -> Tensor:
    out = unwritten(len(x), weight.rows, place=place)
    ops.linear(x.to(place), moved(weight, place), out, rows_of(len(x), place), **options)
    return out.cpu()


def expect(name: str, weight: PackedWeight, x: Tensor, got: Tensor) -> None:
    """The bits of the CPU's integer kernels; the values of float formats."""
    if not is_float(name):
        assert torch.equal(got, cases.linear(weight, x))
        return
    exact = seen(name, x) @ weight.unpack().double().T
    scale = seen(name, x).abs() @ weight.unpack().double().abs().T
    assert ((got - exact).abs() <= 1e-6 * scale).all()


@pytest.mark.parametrize("name", NAMES)
def test_one_row(name: str, ops: CudaOps, place: torch.device) -> None:
    weight = cases.random_weight(name, 20, 72)
    x = torch.randn(1, 72, generator=torch.Generator().manual_seed(1))
    expect(name, weight, x, product(ops, place, weight, x))


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith("int4-g1")])
def test_many_rows_with_extreme_codes(name: str, ops: CudaOps, place: torch.device) -> None:
    weight = cases.extreme_weight(name, 18, 40)
    x = torch.randn(MANY, 40, generator=torch.Generator().manual_seed(2))
    x[1] = 0
    x[2, :32] = torch.tensor([1.0, -1.0]).repeat(16) * 1e30
    x[3] *= 1e-35
    if is_float(name):
        x[2:4] = 1
    expect(name, weight, x, product(ops, place, weight, x))


@pytest.mark.parametrize("rows", [1, MANY])
def test_bias_accumulation_and_rows_past_the_live_ones(
    rows: int, ops: CudaOps, place: torch.device
) -> None:
    random = torch.Generator().manual_seed(3)
    weight = cases.random_weight("int4z-g32", 35, 64)
    x, bias = torch.randn(rows + 2, 64, generator=random), torch.randn(35, generator=random)
    start = torch.randn(rows + 2, 35, generator=random)
    out = start.clone().to(place)
    ops.linear(
        x.to(place), moved(weight, place), out, rows_of(rows, place), bias=bias.to(place),
        accumulate=True,
    )  # fmt: skip
    expected = start + (cases.linear(weight, x) + bias)
    assert torch.equal(out.cpu()[:rows], expected[:rows])
    assert torch.equal(out.cpu()[rows:], start[rows:])


@pytest.mark.parametrize("name", ["int8-g32", "f32"])
def test_broken_activations_never_give_numbers(
    name: str, ops: CudaOps, place: torch.device
) -> None:
    weight = cases.random_weight(name, 16, 64)
    x = torch.ones(3, 64)
    x[0, 40], x[2, 3] = torch.nan, torch.inf
    got = product(ops, place, weight, x)
    assert not got[0].isfinite().any() and not got[2].isfinite().any()
    assert got[1].isfinite().all()


def test_heads_meet_their_own_rows(ops: CudaOps, place: torch.device) -> None:
    weight, heads = cases.random_weight("int8-g32", 96, 40), 3
    x = torch.randn(2, heads * 48, generator=torch.Generator().manual_seed(4))
    out = unwritten(2, 96, place=place)
    ops.linear_heads(x.to(place), moved(weight, place), out, rows_of(2, place), heads=heads)
    by_head = x.view(2, heads, 48)[..., :40]
    for h in range(heads):
        whole = cases.linear(weight, by_head[:, h].contiguous())
        assert torch.equal(out.cpu()[:, h * 32 : (h + 1) * 32], whole[:, h * 32 : (h + 1) * 32])


def test_a_recorded_program_reads_rows_when_it_is_replayed(
    ops: CudaOps, place: torch.device
) -> None:
    weight, x = cases.random_weight("int4-g32", 16, 32), torch.ones(2, 32)
    out, rows = torch.zeros(2, 16, device=place), rows_of(1, place)
    with ops.record() as program:
        ops.linear(x.to(place), moved(weight, place), out, rows)
    assert not out.any()
    program.replay()
    assert out[0].any() and not out[1].any()
    rows.fill_(2)
    program.replay()
    assert torch.equal(out[0], out[1])


def test_what_has_no_kernel_is_refused_by_name(ops: CudaOps, place: torch.device) -> None:
    x, rows = torch.ones(1, 256, device=place), rows_of(1, place)
    lattice = cases.random_weight("iq2xs", 16, 256)
    with pytest.raises(UnsupportedFormat, match=r"iq2xs has no kernel.*int4-g32"):
        ops.linear(x, moved(lattice, place), unwritten(1, 16, place=place), rows)
    weight = moved(cases.random_weight("int4-g32", 16, 256), place)
    with pytest.raises(InvalidRequest, match=r"\[16, 256\] does not map \[1, 256\].*\[1, 8\]"):
        ops.linear(x, weight, unwritten(1, 8, place=place), rows)
    with pytest.raises(UnsupportedOp, match="16 output channels are not 2 times a multiple of 16"):
        ops.linear_heads(x, weight, unwritten(1, 16, place=place), rows, heads=2)
    assert "rmsnorm" in OP_NAMES
    with pytest.raises(UnsupportedOp, match="cuda does not implement the op 'rmsnorm'"):
        ops.rmsnorm(x, x, x, rows, eps=1e-6)

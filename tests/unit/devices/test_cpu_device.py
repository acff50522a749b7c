"""The cpu device: opening it, its threads, and the wiring of each op to its kernel."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from moestro import devices, formats, native
from moestro.core.errors import UnsupportedFormat, UnsupportedOp
from moestro.devices import cpu
from moestro.devices.cpu.ops import CpuOps
from moestro.formats.base import PackedWeight
from moestro.machine import facts
from moestro.ops.contracts import ExpertBiases, Projection
from moestro.ops.dispatch import OP_NAMES
from moestro.ops.reference import ReferenceOps

OPS = CpuOps()
ORACLE = ReferenceOps()


@pytest.fixture(autouse=True)
def restore_native() -> Iterator[None]:
    isa, threads = native.isa(), native.threads()
    yield
    native.set_isa(isa)
    native.set_threads(threads)


def live(n: int) -> Tensor:
    return torch.tensor([n], dtype=torch.int32)


def packed(rows: int, cols: int, name: str = "f32") -> PackedWeight:
    made = formats.get(name)
    weight = torch.randn(rows, cols) / cols**0.5
    return PackedWeight(made, rows, cols, made.pack(weight))


def test_the_registry_knows_it():
    device = devices.get("cpu")
    assert device.name == "cpu"
    assert device is devices.get("cpu")
    assert isinstance(device.ops, CpuOps)


def test_it_shows_the_kernel_table_and_sets_the_threads_of_the_process():
    device = cpu.open_device()
    for isa in native.supported_isas():
        native.set_isa(isa)
        assert device.isa == isa
    device.set_threads(3)
    assert native.threads() == 3


def test_opening_takes_one_thread_per_core_unless_told(monkeypatch: pytest.MonkeyPatch):
    native.set_threads(7)
    monkeypatch.setenv("MOESTRO_THREADS", "7")
    cpu.open_device()
    assert native.threads() == 7
    monkeypatch.delenv("MOESTRO_THREADS")
    cpu.open_device()
    assert native.threads() == facts.gather().threads


def test_it_implements_every_op():
    assert {name for name in OP_NAMES if hasattr(CpuOps, name)} == OP_NAMES


def test_an_op_it_lacks_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(CpuOps, "rope")
    with pytest.raises(UnsupportedOp, match=r"device cpu does not implement the op 'rope'"):
        _ = OPS.rope
    with pytest.raises(AttributeError, match="no attribute 'ropes'"):
        _ = OPS.ropes  # type: ignore[attr-defined]


def test_linear_and_embedding_reach_their_kernels():
    weight, bias, x = packed(48, 40), torch.randn(48), torch.randn(3, 40)
    for options in ({}, {"bias": bias}, {"accumulate": True}, {"bias": bias, "accumulate": True}):
        mine, oracle = torch.ones(3, 48), torch.ones(3, 48)
        OPS.linear(x, weight, mine, live(3), **options)
        ORACLE.linear(x, weight, oracle, live(3), **options)
        torch.testing.assert_close(mine, oracle, rtol=1e-5, atol=1e-5)
    ids = torch.tensor([47, 0, 5], dtype=torch.int32)
    mine, oracle = torch.zeros(3, 40), torch.zeros(3, 40)
    OPS.embed_tokens(ids, weight, mine, live(2))
    ORACLE.embed_tokens(ids, weight, oracle, live(2))
    assert torch.equal(mine, oracle)


@dataclass
class Bank:
    """Experts of one layer side by side in one buffer, as an ExpertTable."""

    experts: list[tuple[PackedWeight, PackedWeight, PackedWeight]]
    activation: str = "silu"
    biases: ExpertBiases | None = None
    input_orders: Tensor | None = None
    blobs: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.blobs = [torch.cat([part.data for part in expert]) for expert in self.experts]

    @property
    def pointers(self) -> Tensor:
        return torch.tensor([blob.data_ptr() for blob in self.blobs])

    @property
    def projections(self) -> list[Projection]:
        offset, found = 0, []
        for part in self.experts[0]:
            name = part.format_name
            found.append(
                Projection(format_name=name, rows=part.rows, cols=part.cols, offset=offset)
            )
            offset += part.nbytes
        return found

    def expert(self, index: int) -> tuple[PackedWeight, PackedWeight, PackedWeight]:
        return self.experts[index]


def test_moe_reaches_its_kernel_and_a_program_keeps_the_experts_alive():
    bank = Bank([(packed(32, 64), packed(32, 64), packed(64, 32)) for _ in range(4)])
    x, weights = torch.randn(3, 64), torch.rand(3, 2)
    ids = torch.tensor([[0, 3], [2, -1], [1, 0]], dtype=torch.int32)
    oracle, mine = torch.ones(3, 64), torch.ones(3, 64)
    ORACLE.moe(x, ids, weights, bank, oracle, live(3), accumulate=True)
    with OPS.record() as program:
        OPS.moe(x, ids, weights, bank, mine, live(3), accumulate=True)
    alive = weakref.ref(bank)
    del bank
    gc.collect()
    assert alive() is not None
    program.replay()
    torch.testing.assert_close(mine, oracle, rtol=1e-4, atol=1e-4)


def test_a_format_without_kernels_is_refused_by_name():
    class Odd:
        format_name, rows, cols = "int3-g7", 16, 32
        data = torch.zeros(64, dtype=torch.uint8)
        input_order = None

        def unpack(self) -> Tensor:
            raise NotImplementedError

    with pytest.raises(UnsupportedFormat, match="int3-g7"):
        OPS.linear(torch.zeros(1, 32), Odd(), torch.zeros(1, 16), live(1))


def test_same_bits_is_the_default_and_one_switch_of_the_process() -> None:
    device = devices.get("cpu")
    assert native.same_bits()
    try:
        device.set_same_bits(False)
        assert not native.same_bits()
    finally:
        device.set_same_bits(True)
    assert native.same_bits()

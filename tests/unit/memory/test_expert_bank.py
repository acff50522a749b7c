"""The blob layout of experts, and that banks hand out views of one aligned buffer."""

import pytest
import torch

from moestro import formats
from moestro.core.errors import CheckpointError, InvalidRequest, OutOfBudget
from moestro.devices.reference import ReferenceDevice
from moestro.memory.expert_bank import BlobLayout, ExpertBank, aligned_buffer
from moestro.ops.contracts import ExpertBiases


def make_bank(names=("int4-g32", "int8-g32", "k6"), count=3, inter=40, hidden=300):
    parts = [(names[0], inter, hidden), (names[1], inter, hidden), (names[2], hidden, inter)]
    bank = ExpertBank(BlobLayout.plan(parts), count, name="layers.5.experts")
    weights = []
    for e in range(count):
        floats = [torch.randn(rows, cols) for _, rows, cols in parts]
        packed = [formats.get(p[0]).pack(w) for p, w in zip(parts, floats, strict=True)]
        bank.layout.fill(bank.blob(e), packed)
        weights.append(packed)
    return bank, weights


def test_blobs_follow_each_other_page_aligned_with_parts_at_cache_lines():
    bank, _ = make_bank()
    sizes = [formats.get(p.format_name).nbytes(p.rows, p.cols) for p in bank.projections]
    ends = 0
    for part, size in zip(bank.projections, sizes, strict=True):
        assert part.offset % 64 == 0 and ends <= part.offset < ends + 64
        ends = part.offset + size
    assert bank.layout.nbytes % 4096 == 0 and ends <= bank.layout.nbytes < ends + 4096
    assert bank.buffer.data_ptr() % 4096 == 0
    base = bank.buffer.data_ptr()
    assert bank.pointers.dtype == torch.int64
    assert bank.pointers.tolist() == [base + e * bank.layout.nbytes for e in range(3)]


def test_odd_sized_parts_are_aligned_too():
    layout = BlobLayout.plan([("int4z-g32", 16, 32), ("int4z-g32", 16, 32), ("int4z-g32", 32, 16)])
    assert [part.offset for part in layout.projections] == [0, 320, 640]  # 304 bytes each
    assert layout.nbytes == 4096


def test_experts_are_views_and_gaps_are_zero():
    bank, weights = make_bank()
    for e in range(3):
        for part, packed in zip(bank.expert(e), weights[e], strict=True):
            assert torch.equal(part.data, packed)
            start, stop = bank.buffer.data_ptr(), bank.buffer.data_ptr() + bank.nbytes
            assert start <= part.data.data_ptr() < stop
    covered = torch.zeros(bank.layout.nbytes, dtype=torch.bool)
    for index in range(3):
        start, stop = bank.layout.part_range(index)
        covered[start:stop] = True
    assert bool((bank.blob(1)[~covered] == 0).all())


def test_an_expert_outside_the_bank_is_refused():
    bank, _ = make_bank()
    for index in (-1, 3):
        with pytest.raises(
            InvalidRequest, match=rf"layers.5.experts has experts 0..2, not {index}"
        ):
            bank.expert(index)


def test_a_buffer_of_the_wrong_size_is_refused():
    bank, _ = make_bank()
    with pytest.raises(CheckpointError, match="3 experts take"):
        ExpertBank(bank.layout, 3, buffer=bank.buffer[:-1])


def test_more_memory_than_there_is_is_out_of_budget():
    with pytest.raises(OutOfBudget, match="cannot be allocated"):
        aligned_buffer(1 << 60)


def test_forward_computes_the_chosen_experts():
    bank, _ = make_bank(hidden=64)
    x, out = torch.randn(2, 64), torch.zeros(2, 64)
    ids = torch.tensor([[2, 0], [1, -1]], dtype=torch.int32)
    weights = torch.tensor([[0.75, 0.25], [1.0, 9.0]])
    bank.forward(ReferenceDevice().ops, x, ids, weights, out, torch.tensor([2], dtype=torch.int32))
    for t in range(2):
        want = torch.zeros(64)
        for slot in range(2):
            if ids[t, slot] >= 0:
                gate, up, down = (part.unpack() for part in bank.expert(int(ids[t, slot])))
                hidden = torch.nn.functional.silu(gate @ x[t]) * (up @ x[t])
                want += weights[t, slot] * (down @ hidden)
        assert torch.allclose(out[t], want, rtol=1e-4, atol=1e-4)


def test_biases_must_fit_the_bank():
    bank, _ = make_bank()
    assert bank.biases is None
    fitting = {"gate": (3, 40), "up": (3, 40), "down": (3, 300)}
    for name, wrong in (("gate", (3, 41)), ("up", (2, 40)), ("down", (3, 40))):
        shapes = {**fitting, name: wrong}
        biases = ExpertBiases(**{k: torch.zeros(s) for k, s in shapes.items()})
        with pytest.raises(CheckpointError, match=rf"the {name} biases should be float32 .*, but"):
            bank.set_biases(biases)
    half = ExpertBiases(**{k: torch.zeros(s).half() for k, s in fitting.items()})
    with pytest.raises(CheckpointError, match="are float16"):
        bank.set_biases(half)
    biases = ExpertBiases(**{k: torch.ones(s) for k, s in fitting.items()})
    bank.set_biases(biases)
    assert bank.biases is biases

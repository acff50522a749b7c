"""Pieces of a weight, packed one after the other, are the bytes of the whole weight as loaded."""

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoints import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    MemoryCheckpoint,
    expert_tensors,
    experts,
    matrix,
    vector,
)

from moestro.checkpoints import open_checkpoint
from moestro.core.errors import CheckpointError, InvalidRequest
from moestro.memory import pieces as pieces_module
from moestro.memory.loader import load_weights
from moestro.memory.packing import ErrorSum, Packer
from moestro.memory.pieces import PIECE_NBYTES, packed_nbytes, pieces
from moestro.memory.policy import FormatPolicy
from moestro.memory.sources import resolve
from moestro.memory.weights import HeadRows

ROWS = 200  # of blocks of 16 the last one is not full
SMALL = 4096


def packed(checkpoint, spec, policy, importance=None, monkeypatch=None, size=PIECE_NBYTES):
    """(bytes of all pieces, number of pieces, most bytes of one, relative error)."""
    if monkeypatch is not None:
        monkeypatch.setattr(pieces_module, "PIECE_NBYTES", size)
    [source] = resolve(checkpoint, [spec], policy)
    found, errors, largest = [], ErrorSum(), 0
    with Packer(checkpoint, importance=importance, measure=True) as packer:
        for piece in pieces(packer, source):
            out = torch.full((piece.packed_nbytes,), 0xA5, dtype=torch.uint8)
            piece.pack(piece.read(), out, errors)
            found.append(out)
            largest = max(largest, piece.nbytes, piece.packed_nbytes)
            assert piece.key == spec.key
    data = torch.cat(found)
    assert data.numel() == packed_nbytes(source)
    return data, len(found), largest, errors.relative


def loaded(checkpoint, spec, policy):
    weight = load_weights(checkpoint, [spec], policy=policy)[spec.key]
    if isinstance(weight, torch.Tensor):
        return weight.reshape(-1).view(torch.uint8)
    return weight.buffer if hasattr(weight, "expert") else weight.data


def check(monkeypatch, checkpoint, spec, policy, *, size=SMALL, cut=True):
    policy = FormatPolicy.parse(policy)
    want = loaded(checkpoint, spec, policy)
    whole, _, _, error = packed(checkpoint, spec, policy)
    found, count, largest, in_pieces = packed(
        checkpoint, spec, policy, monkeypatch=monkeypatch, size=size
    )
    assert torch.equal(whole, want) and torch.equal(found, want)
    assert in_pieces == pytest.approx(error, rel=1e-9)
    if cut:
        gap = 4096 if spec.kind == "experts" else 0  # up to the next blob
        assert count > 2 and largest <= size + gap
    else:
        assert count == (EXPERTS if spec.kind == "experts" else 1)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize("policy", ["", "int4-g32", "int8-row", "k4", "f32"])
def test_a_matrix_of_floats(monkeypatch, policy):
    size = 1 << 15 if policy == "k4" else SMALL
    rows = 1000 if policy == "k4" else ROWS
    checkpoint = MemoryCheckpoint({"q": noise(rows, HIDDEN)})
    check(monkeypatch, checkpoint, matrix("q", rows), policy, size=size)


@pytest.mark.parametrize("policy", ["", "int8-g32"])
@pytest.mark.parametrize(("heads", "together"), [(20, 80), (25, 16), (2, 800)])
def test_gguf_blocks_with_permuted_heads(monkeypatch, policy, heads, together):
    """A piece has whole heads (here of 10, 8 and 100 rows) and whole blocks of 16."""
    values = np.random.default_rng(0).standard_normal((ROWS, 64)).astype(np.float32)
    raw = torch.from_numpy(gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_0)).reshape(-1)
    checkpoint = MemoryCheckpoint({"q": ("Q4_0", (ROWS, 64), raw)}, "gguf")
    size = together * 70
    spec = matrix("q", ROWS, 64, unpermute_heads=heads)
    check(monkeypatch, checkpoint, spec, policy, size=size, cut=together < ROWS)
    with pytest.raises(CheckpointError, match="do not divide into 7 heads"):
        check(monkeypatch, checkpoint, matrix("q", ROWS, 64, unpermute_heads=7), policy)


@pytest.mark.parametrize("shape", [(1, ROWS, 64), (8, ROWS // 8, 64)])
def test_rows_of_tensors_with_more_axes(monkeypatch, shape):
    checkpoint = MemoryCheckpoint({"q": noise(*shape)})
    head_rows = HeadRows(sources=("other",), heads=8, rows=50, first=0, count=ROWS // 8)
    check(monkeypatch, checkpoint, matrix("q", ROWS, head_rows=head_rows), "int8-g32")


def stacked(fused: bool, per_expert: bool) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """A layer's experts stacked in one tensor or apart, gate and up fused or not."""
    single = expert_tensors(0)

    def all_of(name: str) -> torch.Tensor:
        return torch.stack([single[f"layers.0.experts.{e}.{name}"] for e in range(EXPERTS)])

    tensors = {name: all_of(name) for name in ("gate", "up", "down")}
    if fused:
        tensors["gate_up"] = torch.cat([tensors.pop("gate"), tensors.pop("up")], dim=1)
    if not per_expert:
        return tensors, {name: (name,) for name in tensors}
    apart = {f"{name}.{e}": t[e] for name, t in tensors.items() for e in range(EXPERTS)}
    return apart, {name: (f"{name}.{{e}}",) for name in tensors}


@pytest.mark.parametrize("policy", ["", "experts=int4-g32", "*.gate=int8-g32,*.down=f32"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("per_expert", [False, True])
def test_experts(monkeypatch, policy, fused, per_expert):
    tensors, names = stacked(fused, per_expert)
    checkpoint = MemoryCheckpoint(tensors)
    spec = experts(**names)
    check(monkeypatch, checkpoint, spec, policy)
    check(monkeypatch, checkpoint, spec, policy, size=SMALL // 2)


def test_transposed_experts_stay_whole(monkeypatch):
    tensors, _ = stacked(fused=True, per_expert=False)
    swapped = {name: tensor.transpose(1, 2).contiguous() for name, tensor in tensors.items()}
    spec = experts(gate_up=("gate_up",), down=("down",), layout="interleaved_transposed")
    check(monkeypatch, MemoryCheckpoint(swapped), spec, "experts=int4-g32", cut=False)


def test_vectors_and_importance(monkeypatch):
    checkpoint = MemoryCheckpoint({"norm": noise(HIDDEN), "q": noise(ROWS, HIDDEN)})
    check(monkeypatch, checkpoint, vector(), "", cut=False)
    importance = {"q": torch.rand(HIDDEN) ** 4}
    policy = FormatPolicy.parse("int4-g32")
    whole, *_ = packed(checkpoint, matrix("q", ROWS), policy, importance)
    monkeypatch.setattr(pieces_module, "PIECE_NBYTES", SMALL)
    cut, count, *_ = packed(checkpoint, matrix("q", ROWS), policy, importance)
    assert torch.equal(whole, cut) and count > 2
    assert not torch.equal(cut, packed(checkpoint, matrix("q", ROWS), policy)[0])


def test_importance_of_experts(monkeypatch):
    checkpoint = MemoryCheckpoint(expert_tensors(0))
    importance = {"layers.0.experts.down": torch.rand(EXPERTS, INTERMEDIATE) ** 4}
    policy = FormatPolicy.parse("int4-g32")
    whole, *_ = packed(checkpoint, experts(), policy, importance)
    cut, count, *_ = packed(
        checkpoint, experts(), policy, importance, monkeypatch=monkeypatch, size=SMALL
    )
    assert torch.equal(whole, cut) and count > EXPERTS


def test_every_row_is_read_once(monkeypatch, tmp_path):
    ranges = []

    class Watched(MemoryCheckpoint):
        def read_range(self, name, start, nbytes):
            ranges.append((name, start, start + nbytes))
            return super().read_range(name, start, nbytes)

    tensors, names = stacked(fused=True, per_expert=False)
    checkpoint = Watched(tensors)
    packed(checkpoint, experts(**names), FormatPolicy.parse("f32"), monkeypatch=monkeypatch,
           size=SMALL)  # fmt: skip
    for name, tensor in tensors.items():
        end = 0
        for _, start, stop in sorted(r for r in ranges if r[0] == name):
            assert start == end
            end = stop
        assert end == tensor.nbytes
    assert not checkpoint.reads or set(checkpoint.reads) == set(tensors)


def test_ranges_of_files_are_checked(tmp_path):
    save_file({"q": noise(ROWS, HIDDEN)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path / "model.safetensors") as checkpoint:
        whole = checkpoint.read("q")
        assert torch.equal(checkpoint.read_range("q", 100, 5000), whole[100:5100])
        assert checkpoint.read_range("q", whole.numel(), 0).numel() == 0
        for start, nbytes in ((-1, 1), (0, whole.numel() + 1), (5, -1), (whole.numel(), 1)):
            with pytest.raises(InvalidRequest, match=r"of q, which has 25600"):
                checkpoint.read_range("q", start, nbytes)

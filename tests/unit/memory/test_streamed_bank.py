"""A bank whose experts stay on disk: what it hands out, counts and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moestro import devices, formats
from moestro.core.errors import InvalidRequest, StorageError
from moestro.memory.expert_bank import BlobLayout, ExpertBank
from moestro.memory.streamed_bank import BlobsOnDisk, ExpertFiles, StreamedBank, Streaming

HIDDEN, INTERMEDIATE, EXPERTS = 64, 32, 6
LAYOUT = BlobLayout.plan(
    [("f32", INTERMEDIATE, HIDDEN), ("f32", INTERMEDIATE, HIDDEN), ("f32", HIDDEN, INTERMEDIATE)]
)


@pytest.fixture
def whole() -> ExpertBank:
    generator = torch.Generator().manual_seed(0)
    bank = ExpertBank(LAYOUT, EXPERTS)
    for e in range(EXPERTS):
        matrices = [
            torch.randn(p.rows, p.cols, generator=generator) / 8 for p in LAYOUT.projections
        ]
        LAYOUT.fill(bank.blob(e), [formats.get("f32").pack(matrix) for matrix in matrices])
    return bank


@pytest.fixture
def path(whole: ExpertBank, tmp_path: Path) -> Path:
    """Two layers in one file, the second as in ``whole``."""
    path = tmp_path / "experts.bin"
    path.write_bytes(bytes(whole.nbytes) + whole.buffer.numpy().tobytes())
    return path


def streamed(path: Path, *, slots: int = 2, files: ExpertFiles | None = None) -> StreamedBank:
    blobs = BlobsOnDisk(
        files=files or ExpertFiles([path]), path=path, offset=EXPERTS * LAYOUT.nbytes
    )
    return StreamedBank(LAYOUT, EXPERTS, slots=slots, blobs=blobs, name="layers.1.experts")


def forward(bank: ExpertBank, ids: list[list[int]]) -> torch.Tensor:
    x = torch.randn(len(ids), HIDDEN, generator=torch.Generator().manual_seed(1))
    out, rows = torch.zeros_like(x), torch.tensor([len(ids)], dtype=torch.int32)
    weights = torch.full((len(ids), len(ids[0])), 0.5)
    chosen = torch.tensor(ids, dtype=torch.int32)
    bank.forward(devices.get("cpu").ops, x, chosen, weights, out, rows)
    return out


def test_it_gives_what_the_bank_in_memory_gives(whole: ExpertBank, path: Path) -> None:
    bank = streamed(path)
    for ids in ([[0, 5]], [[5, 1]], [[1, 2], [3, 4], [5, 0]]):
        assert torch.equal(forward(bank, ids), forward(whole, ids))
    for e in range(EXPERTS):
        assert torch.equal(bank.blob(e), whole.blob(e))
        for found, expected in zip(bank.expert(e), whole.expert(e), strict=True):
            assert torch.equal(found.unpack(), expected.unpack())
    assert not bank.pointers.any()
    assert bank.nbytes == 2 * LAYOUT.nbytes
    assert "6 x f32/f32/f32, 2 in" in repr(bank)


def test_it_counts_what_was_found_and_what_was_read(path: Path) -> None:
    files = ExpertFiles([path, path])
    banks = [streamed(path, files=files), streamed(path, slots=3, files=files)]
    streaming = Streaming.of([torch.zeros(1), *banks])
    assert streaming is not None
    assert streaming.stats().hit_rate == 1
    before = streaming.stats()
    for bank in banks:
        forward(bank, [[0, 1]])
        forward(bank, [[1, 2]])
    stats = streaming.stats()
    assert (stats.experts, stats.slots) == (12, 5)
    assert (stats.hits, stats.misses, stats.decode_hits, stats.decode_misses) == (2, 6, 2, 6)
    assert stats.nbytes == 6 * LAYOUT.nbytes and stats.rate > 0
    assert stats.since(before) == stats
    assert stats.since(stats).misses == 0
    assert stats.policies == {"lfu": 2}
    assert stats.shadow_misses == dict.fromkeys(("lfu", "lru", "lfru", "static"), 6)
    assert str(stats).startswith("experts from disk: 5 of 12 in memory, 25% found there, ")
    assert Streaming.of([torch.zeros(1)]) is None


def test_files_that_fail_are_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"none\.bin"):
        ExpertFiles([tmp_path / "none.bin"])
    bank = streamed(path)
    with pytest.raises(InvalidRequest, match=r"experts 0\.\.5, not 6"):
        bank.blob(6)
    with open(path, "r+b") as file:
        file.truncate(EXPERTS * LAYOUT.nbytes + 100)
    with pytest.raises(StorageError, match=r"experts\.bin"):
        forward(bank, [[3, 4]])
    with pytest.raises(StorageError, match="expert 3"):
        bank.blob(3)
    path.unlink()
    with pytest.raises(StorageError, match=r"experts\.bin"):
        bank.blob(3)

"""The measurement of disks: what is read, what is chosen, what is left behind."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from moestro.core.errors import InvalidRequest
from moestro.machine import disk
from moestro.machine.disk import DiskFacts, measure_disk

MIB = 1 << 20


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_FILE_NBYTES", 16 * MIB)
    monkeypatch.setattr(disk, "_LEAST_NBYTES", 4 * MIB)
    monkeypatch.setattr(disk, "_SECONDS", 0.003)
    monkeypatch.setattr(disk, "_PIECE", MIB)
    monkeypatch.setattr(disk, "_DEPTHS", (1, 2, 4))
    monkeypatch.setattr(disk, "_IN_FLIGHT", 16 * MIB)


def test_a_directory_is_measured_by_a_file_that_goes_again(tmp_path: Path) -> None:
    found = measure_disk(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert {nbytes for nbytes, _, _ in found.rates} == {MIB << i for i in range(5)}
    assert {depth for _, depth, _ in found.rates} == {1, 2, 4}
    assert found.queue_depth in {1, 2, 4}
    assert 0 < found.least <= found.read <= found.greatest


def test_files_of_a_model_are_read_where_there_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(4):
        (tmp_path / f"part-{i}").write_bytes(bytes([i]) * (5 * MIB))
    (tmp_path / "small").write_bytes(b"x")
    monkeypatch.setattr(disk.tempfile, "TemporaryFile", None)  # none is needed
    found = measure_disk(tmp_path)
    assert max(nbytes for nbytes, _, _ in found.rates) == 4 * MIB  # no read goes beyond a file
    one = tmp_path / "one"
    one.write_bytes(bytes(16 * MIB))
    assert max(nbytes for nbytes, _, _ in measure_disk(one).rates) == 16 * MIB


def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match="cannot be measured"):
        measure_disk(tmp_path / "nowhere" / "file")
    monkeypatch.setattr(disk, "disk_free", lambda path: 8 * MIB)
    with pytest.raises(InvalidRequest, match="too little room"):
        measure_disk(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_refuses_unbuffered_reads_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = disk.os.open

    def refusing(path: Path, flags: int) -> int:
        if flags & disk.os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags)

    monkeypatch.setattr(disk.os, "open", refusing)
    file = tmp_path / "file"
    file.write_bytes(bytes(16 * MIB))
    assert not measure_disk(file).direct


def test_reads_of_a_size_take_the_nearest_that_was_tried() -> None:
    rates = (
        (MIB, 1, 1e9),
        (MIB, 4, 2e9),
        (4 * MIB, 1, 1.5e9),
        (4 * MIB, 4, 3e9),
        (4 * MIB, 8, 3.05e9),
    )
    facts = DiskFacts(read=3.05e9, queue_depth=4, direct=True, rates=rates)
    assert DiskFacts(**json.loads(json.dumps(asdict(facts)))) == facts
    assert facts.of(MIB // 2) == (2e9, 4)
    assert facts.of(3 * MIB) == (3e9, 4)
    assert facts.of(64 * MIB) == (3e9, 4)
    assert DiskFacts(read=1e9, queue_depth=4, direct=True).of(MIB) == (1e9, 4)

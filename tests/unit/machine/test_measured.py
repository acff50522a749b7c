"""What was measured is kept while nothing it depends on changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from moestro.core.errors import InvalidRequest
from moestro.machine import disk as disk_module
from moestro.machine import measured
from moestro.machine.disk import DiskFacts, measure_disk
from moestro.machine.measured import Measured
from moestro.machine.rates import CpuRates, Rate

CPU = CpuRates(threads=1, read=Rate.exactly(1e9), dot=1e9, pairs=1e9)
DISK = DiskFacts(read=1e9, queue_depth=4, direct=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOESTRO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_it_is_found_again_and_disks_add_up(tmp_path: Path) -> None:
    assert measured.load() == Measured()
    measured.keep(Measured(cpu=CPU, disks={"other": DISK}))
    measured.keep(Measured(cpu=CPU, disks={measured.disk_key(tmp_path): DISK}))
    found = measured.load()
    assert found.cpu == CPU and found.when > 0
    assert found.disk(tmp_path / "not" / "there" / "yet") == DISK
    assert set(found.disks) == {"other", measured.disk_key(tmp_path)}
    machine = found.machine(memory=5, path=tmp_path)
    assert machine is not None and machine.measured
    assert (machine.memory, machine.disk, machine.queue_depth) == (5, 1e9, 4)


def test_without_a_measurement_there_is_no_machine(tmp_path: Path) -> None:
    assert Measured().machine(memory=5, path=tmp_path) is None


@pytest.mark.parametrize(("name", "value"), [("MOESTRO_THREADS", "1"), ("MOESTRO_PIN", "none")])
def test_other_settings_are_another_machine(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    measured.keep(Measured(cpu=CPU))
    monkeypatch.setenv(name, value)
    assert measured.load() == Measured()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 1, "key": 5}', "\xff"])
def test_a_damaged_file_is_an_empty_one(cache: Path, content: str) -> None:
    measured.keep(Measured(cpu=CPU))
    (cache / "machine.json").write_text(content, encoding="latin-1")
    assert measured.load() == Measured()


def test_fields_of_another_kind_are_no_measurement(cache: Path) -> None:
    measured.keep(Measured(cpu=CPU))
    path = cache / "machine.json"
    path.write_text(path.read_text().replace('"threads": 1', '"threads": {}'))
    assert measured.load() == Measured()


def test_a_disk_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "_FILE_NBYTES", 1 << 24)
    monkeypatch.setattr(disk_module, "_SECONDS", 0.02)
    found = measure_disk(tmp_path)
    assert found.read > 0 and found.queue_depth >= 1
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidRequest, match="cannot be measured"):
        measure_disk(tmp_path / "nowhere" / "file")

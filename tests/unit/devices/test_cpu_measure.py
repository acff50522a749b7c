"""Measuring the CPU gives rates of everything asked for, and leaves the team as runs get it."""

from __future__ import annotations

import pytest

from moestro import devices, formats, native
from moestro.devices.cpu import measure


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_READ_NBYTES", 1 << 23)
    monkeypatch.setattr(measure, "_KERNEL_SECONDS", 0.002)


def test_rates_of_memory_arithmetic_and_kernels() -> None:
    threads = devices.get("cpu").set_threads()
    heard: list[str] = []
    found = measure.measure([formats.DEFAULT], step=heard.append)
    assert native.threads() == threads == found.threads
    assert set(found.kernels) == {formats.DEFAULT}
    rate = found.kernels[formats.DEFAULT]
    assert rate.one > 0 and rate.more > 0
    assert found.read.least <= found.read.median <= found.read.greatest
    assert found.read_one is not None and found.copy is not None
    assert min(found.dot, found.pairs, found.read.least, found.copy.least) > 0
    assert any(formats.DEFAULT in text for text in heard)

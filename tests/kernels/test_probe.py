"""The probes measure something, and refuse nonsense."""

from __future__ import annotations

import pytest

from moestro import native
from moestro.core.errors import InvalidRequest


def test_probes_return_rates() -> None:
    assert native.probe_dot() > native.probe_fma() > 0
    assert native.probe_bf16() > 0
    assert native.probe_read(1 << 24) > 0
    with pytest.raises(InvalidRequest):
        native.probe_read(10)


def test_allocated_bytes_are_zero_aligned_and_writable() -> None:
    memory = native.allocate_bytes(3_000_000)
    assert memory.shape == (3_000_000,) and not memory.any()
    assert memory.ctypes.data % (2 << 20) == 0
    memory[-1] = 1
    with pytest.raises(InvalidRequest):
        native.allocate_bytes(0)

"""Every test leaves the kernels as it found them: later tests run on what the process chose."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moestro import native


@pytest.fixture(autouse=True)
def chosen_kernels() -> Iterator[None]:
    before = native.isa()
    yield
    native.set_isa(before)

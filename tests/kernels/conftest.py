"""Every test leaves kernels and threads as it found them: later tests run on what was chosen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moestro import native


@pytest.fixture(autouse=True)
def restore_native() -> Iterator[None]:
    isa, threads = native.isa(), native.threads()
    yield
    native.set_isa(isa)
    native.set_threads(threads)

"""Says so where the tests of the accelerator's kernels are left out."""

from __future__ import annotations

import pytest


def test_triton_is_installed() -> None:
    pytest.importorskip("triton", reason="the accelerator's kernels need triton: moestro[gpu]")

"""The accelerator's kernels, on a card where there is one, else in Triton's interpreter.

Without triton nothing here is collected but ``test_needs.py``, which is skipped and says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
import torch

from moestro import native

if TYPE_CHECKING:
    from moestro.devices.cuda.ops import CudaOps

if find_spec("triton") is None:
    collect_ignore_glob = ["test_gpu_*.py"]
elif os.environ.get("TRITON_INTERPRET") == "1":
    from interpreted import mend

    mend()


@pytest.fixture(scope="session")
def place() -> torch.device:
    """Where buffers lie."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def ops(place: torch.device) -> CudaOps:
    """The ops, in the form that the card runs."""
    from moestro.devices.cuda.ops import CudaOps  # noqa: PLC0415, only where triton is

    return CudaOps("dp4a" if place.type == "cuda" and torch.version.hip is None else "bytes")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The CPU's kernels, for comparison, on one thread."""
    before = native.threads()
    native.set_threads(1)
    yield
    native.set_threads(before)

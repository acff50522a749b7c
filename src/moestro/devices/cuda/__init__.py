"""Kernels for NVIDIA and AMD cards, written in Triton over the common weight tiles.

What there is so far: the products of packed weights, routed experts and attention, as
``ops.CudaOps``. A model also needs norms, rotations, routing and cache writes where its activations
are; until they are here the device does not open. Triton is imported by ``ops``, not by this file.
"""

from __future__ import annotations

from moestro.core.errors import UnsupportedOp
from moestro.devices.base import Device


def open_device() -> Device:
    """Raises UnsupportedOp: not all ops of a model are here yet."""
    raise UnsupportedOp(
        "device cuda does not run whole models yet: it has kernels for linear layers, experts "
        "and attention alone; use device='cpu'"
    )

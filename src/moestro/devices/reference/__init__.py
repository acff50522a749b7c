"""The reference device: every op as slow, obvious torch on the CPU, to compare others with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from moestro.devices.base import Device
from moestro.ops.contracts import Ops
from moestro.ops.reference import ReferenceOps


@dataclass(frozen=True, kw_only=True)
class ReferenceDevice:
    """Computes with ``ops.reference`` in float32."""

    name: str = "reference"
    ops: Ops = field(default_factory=ReferenceOps)
    isa: str = "torch"

    def set_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def check_formats(self, names: Collection[str]) -> None:
        """Nothing: there are no kernels that could be wrong."""


def open_device() -> Device:
    return ReferenceDevice()

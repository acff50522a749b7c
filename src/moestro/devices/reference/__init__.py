"""The reference device: every op as slow, obvious torch on the CPU, to compare others with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from moestro.core import env
from moestro.devices.base import Device
from moestro.machine import facts
from moestro.ops.contracts import Ops
from moestro.ops.reference import ReferenceOps


@dataclass(frozen=True, kw_only=True)
class ReferenceDevice:
    """Computes with ``ops.reference`` in float32."""

    name: str = "reference"
    ops: Ops = field(default_factory=ReferenceOps)
    isa: str = "torch"

    def set_threads(
        self,
        threads: int | None = None,
        *,
        pin: str | None = None,
        numa_nodes: int | None = None,
    ) -> int:
        """Torch's threads, which know no places."""
        torch.set_num_threads(threads or env.threads() or facts.gather().threads)
        return torch.get_num_threads()

    def set_same_bits(self, same: bool) -> None:
        """Nothing to choose: torch computes in float32."""

    def check_formats(self, names: Collection[str]) -> None:
        """Nothing: there are no kernels that could be wrong."""


def open_device() -> Device:
    return ReferenceDevice()

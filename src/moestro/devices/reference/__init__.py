"""The reference device: every op as slow, obvious torch on the CPU, to compare others with."""

from __future__ import annotations

from dataclasses import dataclass, field

from moestro.devices.base import Device
from moestro.ops.contracts import Ops
from moestro.ops.reference import ReferenceOps


@dataclass(frozen=True, kw_only=True)
class ReferenceDevice:
    """Computes with ``ops.reference`` in float32."""

    name: str = "reference"
    ops: Ops = field(default_factory=ReferenceOps)


def open_device() -> Device:
    return ReferenceDevice()

"""An accelerator emulated on the CPU: real streams and events, its own memory budget, the native
kernels of the cpu device. It is no faster than that; it is for running and testing, on any machine,
what goes on between an accelerator and the CPU.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from moestro.devices import cpu
from moestro.devices.base import Device
from moestro.devices.cpu import CpuDevice
from moestro.devices.emulated.memory import EmulatedMemory
from moestro.devices.emulated.ops import EmulatedOps


@dataclass(frozen=True, kw_only=True)
class EmulatedDevice:
    """Computes on a stream of its own, beside which the CPU computes on the same thread team (one
    job at a time, so they interleave rather than overlap).
    """

    cpu: CpuDevice = field(default_factory=CpuDevice)
    name: str = "emulated"
    ops: EmulatedOps = field(default_factory=EmulatedOps)
    memory: EmulatedMemory = field(default_factory=EmulatedMemory)

    @property
    def isa(self) -> str:
        return self.cpu.isa

    def set_threads(
        self,
        threads: int | None = None,
        *,
        pin: str | None = None,
        numa_nodes: int | None = None,
    ) -> int:
        return self.cpu.set_threads(threads, pin=pin, numa_nodes=numa_nodes)

    def set_same_bits(self, same: bool) -> None:
        self.cpu.set_same_bits(same)

    def check_formats(self, names: Collection[str]) -> None:
        self.cpu.check_formats(names)


def open_device() -> Device:
    """The device, with a team of threads as the cpu device has."""
    return EmulatedDevice(cpu=cpu.open_device())

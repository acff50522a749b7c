"""The CPU device: every op on the native kernels, with one compute thread per usable core."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from moestro import native
from moestro.core import env
from moestro.devices.base import Device
from moestro.devices.cpu import self_check
from moestro.devices.cpu.ops import CpuOps
from moestro.machine import facts
from moestro.ops.contracts import Ops


@dataclass(frozen=True, kw_only=True)
class CpuDevice:
    """Computes with the native kernels on the process's thread team."""

    name: str = "cpu"
    ops: Ops = field(default_factory=CpuOps)

    @property
    def isa(self) -> str:
        """The kernel table in use, as ``moestro.native.isa()`` names it."""
        isa: str = native.isa()
        return isa

    def set_threads(self, threads: int) -> None:
        """InvalidRequest outside 1..1024."""
        native.set_threads(threads)

    def check_formats(self, names: Collection[str]) -> None:
        """SelfCheckError if a kernel in use does not give what the reference does."""
        self_check.require(names)


def open_device() -> Device:
    """The device. Unless ``MOESTRO_THREADS`` says otherwise, the team gets one thread per physical
    core that this process may use, no more than its control group pays for.
    """
    if env.threads() is None:
        native.set_threads(facts.gather().threads)
    return CpuDevice()

"""The CPU device: every op on the native kernels, with one compute thread per usable core."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from moestro import native
from moestro.core import env, log
from moestro.devices.cpu import self_check
from moestro.devices.cpu.ops import CpuOps
from moestro.machine import facts
from moestro.machine.placement import place
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

    def set_threads(
        self,
        threads: int | None = None,
        *,
        pin: str | None = None,
        numa_nodes: int | None = None,
    ) -> int:
        """InvalidRequest for what cannot be placed. What the system does not allow is said as a
        fallback.
        """
        machine = facts.gather()
        placed = place(
            machine,
            threads=threads or env.threads(),
            pin=pin or env.pin() or "auto",
            numa_nodes=numa_nodes or env.numa_nodes(),
        )
        problem = native.set_team(placed.nodes, placed.cpus, placed.node_numbers)
        if problem:
            log.warn_once("pin", f"threads are not pinned: {problem}; with pin=none nobody tries")
        if placed.threads > machine.threads:
            log.warn_once(
                "threads",
                f"{placed.threads} threads share {machine.threads} usable cores and wait for each "
                f"other; use at most {machine.threads}",
            )
        return placed.threads

    def set_same_bits(self, same: bool) -> None:
        native.set_same_bits(same)

    def check_formats(self, names: Collection[str]) -> None:
        """SelfCheckError if a kernel in use does not give what the reference does."""
        self_check.require(names)


def open_device() -> CpuDevice:
    """The device. The team gets one thread per physical core that this process may use, no more
    than its control group pays for, each kept on its core; ``MOESTRO_THREADS``, ``MOESTRO_PIN`` and
    ``MOESTRO_NUMA`` say otherwise.
    """
    device = CpuDevice()
    device.set_threads()
    return device

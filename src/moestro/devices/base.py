"""What a device is to the floors above: a name and the ops it implements."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from moestro.ops.accelerator import AcceleratorOps
from moestro.ops.contracts import Ops


class Device(Protocol):
    """One place that computes. Each device is a folder here whose ``open_device()`` makes it."""

    @property
    def name(self) -> str:
        """The folder's name, for example ``reference``."""
        ...

    @property
    def ops(self) -> Ops:
        """The op table; an op it lacks raises UnsupportedOp."""
        ...

    @property
    def isa(self) -> str:
        """The instruction set its kernels use now, or the library that computes."""
        ...

    def set_threads(
        self,
        threads: int | None = None,
        *,
        pin: str | None = None,
        numa_nodes: int | None = None,
    ) -> int:
        """Compute with this many threads from now on, in the whole process; returns how many.
        What is None is chosen from the environment and the machine (see ``machine.placement``).
        """
        ...

    def set_same_bits(self, same: bool) -> None:
        """Whether products of integer formats have the same bits on every instruction set and for
        any number of tokens, in the whole process, for ops issued or recorded from now on. Off, a
        device may take a faster way with another rounding.
        """
        ...

    def check_formats(self, names: Collection[str]) -> None:
        """Make sure that the kernels of these formats compute rightly on this machine, before
        weights are loaded for them. Raises SelfCheckError.
        """
        ...


class AcceleratorMemory(Protocol):
    """The memory of an accelerator: who has how much of it."""

    @property
    def budget(self) -> int | None:
        """Bytes that may be used; None for all there is."""
        ...

    @property
    def held(self) -> dict[str, int]:
        """Bytes in use by what they are for."""
        ...

    def set_budget(self, nbytes: int | None) -> None:
        """Allow so many bytes from now on."""
        ...

    def reserve(self, what: str, nbytes: int, owner: object) -> None:
        """Count memory that is there already, until ``owner`` is gone. Raises OutOfBudget naming it
        and what else is held.
        """
        ...

    def allocate(self, what: str, nbytes: int) -> Tensor:
        """A zeroed uint8 tensor [nbytes], counted until it is gone. Raises OutOfBudget."""
        ...


@runtime_checkable
class Accelerator(Device, Protocol):
    """A device with memory of its own, beside which the CPU computes."""

    @property
    def ops(self) -> AcceleratorOps[Any]: ...

    @property
    def memory(self) -> AcceleratorMemory: ...

"""What an accelerator's ops have beyond ``contracts.Ops``: work of the CPU inside a step.

An accelerator runs ops later, in order, on a stream. ``submit`` and ``wait`` are steps of that
stream too: a recorded step contains them, and no Python runs when it is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from moestro.ops.contracts import Ops, Program

_Work = TypeVar("_Work")


class AcceleratorOps(Ops, Protocol[_Work]):
    """Ops of a device that has memory of its own. ``copy_rows`` and ``copy_slots`` also go between
    its memory and pinned buffers.
    """

    @property
    def host(self) -> Ops:
        """The CPU's ops, which programs for ``host_work`` are recorded with."""
        ...

    def pinned(self, like: Tensor) -> Tensor:
        """A zeroed buffer of the host of that shape and dtype that copies on a stream may use."""
        ...

    def host_work(
        self, program: Program, *, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> _Work:
        """Recorded ops of the CPU, to be begun and awaited within steps. reads, writes: the pinned
        buffers (two dimensions or more) it works on, which are its own from ``submit`` to ``wait``.
        """
        ...

    def submit(self, work: _Work) -> None:
        """Begin the work as soon as all ops before are done, and go on at once."""
        ...

    def wait(self, work: _Work) -> None:
        """Go on when the work is done. What it raised is raised at the end of the step."""
        ...

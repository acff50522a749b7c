"""The emulated accelerator's memory: a budget, and who holds what of it."""

from __future__ import annotations

import threading
import weakref
from collections import Counter

import torch
from torch import Tensor

from moestro import native
from moestro.core.errors import OutOfBudget
from moestro.core.units import format_bytes


class EmulatedMemory:
    """Bytes by what they are for (``devices.base.AcceleratorMemory``)."""

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self._held: Counter[str] = Counter()
        # Memory is also given back by the garbage collector, from within any thread.
        self._lock = threading.RLock()

    @property
    def held(self) -> dict[str, int]:
        with self._lock:
            return dict(+self._held)

    def set_budget(self, nbytes: int | None) -> None:
        self.budget = nbytes

    def reserve(self, what: str, nbytes: int, owner: object) -> None:
        with self._lock:
            used = self._held.total()
            if self.budget is not None and used + nbytes > self.budget:
                raise OutOfBudget(
                    f"{what} take {format_bytes(nbytes)} of accelerator memory, but of "
                    f"{format_bytes(self.budget)} only {format_bytes(max(0, self.budget - used))} "
                    f"are left{self._others()}; give more accelerator_memory, or place fewer "
                    "experts there"
                )
            self._held[what] += nbytes
        weakref.finalize(owner, self._release, what, nbytes)

    def allocate(self, what: str, nbytes: int) -> Tensor:
        owner = native.allocate_bytes(max(nbytes, 1))
        self.reserve(what, nbytes, owner)
        return torch.from_numpy(owner)[:nbytes]

    def _release(self, what: str, nbytes: int) -> None:
        with self._lock:
            self._held[what] -= nbytes

    def _others(self) -> str:
        held = sorted(self.held.items(), key=lambda item: -item[1])
        parts = [f"{name} {format_bytes(nbytes)}" for name, nbytes in held]
        return f" ({', '.join(parts)})" if parts else ""

"""How fast an accelerator is, where torch finds one: its memory, arithmetic and the bus to it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from moestro.machine.rates import AcceleratorRates

_NBYTES = 1 << 28
_SIDE = 4096
_REPEATS = 5


def present() -> bool:
    """Whether torch can compute on one here (CUDA or ROCm)."""
    return torch.cuda.is_available()


def measure_accelerator() -> AcceleratorRates | None:
    """Of the current one; None without. Takes a second, and half a GiB of its memory."""
    if not present():
        return None
    device = torch.device("cuda")
    here = torch.empty(_NBYTES, dtype=torch.uint8, pin_memory=True)
    there, other = (torch.empty(_NBYTES, dtype=torch.uint8, device=device) for _ in range(2))
    half = torch.ones(_SIDE, _SIDE, dtype=torch.float16, device=device)
    out = torch.empty_like(half)

    def seconds(work: Callable[[], object]) -> float:
        work()
        torch.cuda.synchronize()
        best = float("inf")
        for _ in range(_REPEATS):
            start = time.perf_counter()
            work()
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return best

    facts = torch.cuda.get_device_properties(device)
    return AcceleratorRates(
        name=str(facts.name),
        memory=int(facts.total_memory),
        # A copy reads and writes.
        read=2 * _NBYTES / seconds(lambda: other.copy_(there)),
        compute=2 * _SIDE**3 / seconds(lambda: torch.matmul(half, half, out=out)),
        to_device=_NBYTES / seconds(lambda: there.copy_(here, non_blocking=True)),
        to_host=_NBYTES / seconds(lambda: here.copy_(there, non_blocking=True)),
    )


def identity() -> str:
    """What distinguishes this accelerator and its driver's library; empty without one."""
    if not present():
        return ""
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, HIP {torch.version.hip}"

"""The machine's own limits, measured with the active kernel table beside a benchmark; and how long
a recorded program takes.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass

from moestro import native
from moestro.formats.base import Format
from moestro.machine import facts
from moestro.ops.contracts import Program

READ_BYTES = 1 << 29


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Medians over all probes of a run: read GB/s, and GOP/s of the integer dot, the
    float32 FMA and the product of bfloat16 pairs (the FMA where there is none); None for what was
    not probed."""

    cpu: str
    isa: str
    threads: int
    read_gb_s: float
    read_gb_s_min: float
    read_gb_s_max: float
    dot_gop_s: float | None
    fma_gflop_s: float | None
    bf16_gflop_s: float | None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class Probes:
    """Takes probes between measurements, so that each can be compared with its neighbours."""

    def __init__(self) -> None:
        self._read: list[float] = []
        self._dot: list[float] = []
        self._fma: list[float] = []
        self._bf16: list[float] = []

    def take(self, limit: str) -> float:
        """One probe of ``read``, ``dot``, ``fma`` or ``bf16``."""
        return {"read": self.read, "dot": self.dot, "fma": self.fma, "bf16": self.bf16}[limit]()

    @staticmethod
    def peak_of(fmt: Format) -> str:
        """The limit of the arithmetic that a format's kernels do."""
        return "bf16" if fmt.is_float else "dot"

    def read(self) -> float:
        """Bytes per second."""
        self._read.append(native.probe_read(READ_BYTES))
        return self._read[-1]

    def dot(self) -> float:
        """Integer operations per second."""
        self._dot.append(native.probe_dot())
        return self._dot[-1]

    def fma(self) -> float:
        """Float32 operations per second."""
        self._fma.append(native.probe_fma())
        return self._fma[-1]

    def bf16(self) -> float:
        """Bfloat16 operations per second."""
        self._bf16.append(native.probe_bf16())
        return self._bf16[-1]

    def summary(self) -> Limits:
        return Limits(
            cpu=facts.gather().cpu_model,
            isa=native.isa(),
            threads=native.threads(),
            read_gb_s=statistics.median(self._read) / 1e9,
            read_gb_s_min=min(self._read) / 1e9,
            read_gb_s_max=max(self._read) / 1e9,
            dot_gop_s=_median(self._dot),
            fma_gflop_s=_median(self._fma),
            bf16_gflop_s=_median(self._bf16),
        )


def replay_seconds(program: Program, repeats: int) -> float:
    """Of one replay: the mean of ``repeats``."""
    start = time.perf_counter()
    for _ in range(repeats):
        program.replay()
    return (time.perf_counter() - start) / repeats


def _median(rates: list[float]) -> float | None:
    """In units of 1e9."""
    return statistics.median(rates) / 1e9 if rates else None

"""What a run did beside what the plan predicted, and why they differ if they do."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path

from moestro.devices.cpu import measure
from moestro.engine.loading import Loaded
from moestro.engine.request import Completion
from moestro.machine import measured
from moestro.machine.rates import MachineRates
from moestro.memory.speed import SpeedModel

#: a gap between measured and predicted speed that is explained
NOTABLE = 0.25

# Memory is said to be slower or faster now from this ratio on; cores are said to be shared when
# this process got less of them than that; a run is said to wait for pages from so many a second on.
_OTHER_MEMORY = 0.85
_OWN_CORES = 0.9
_FAULTS_PER_SECOND = 10.0
_UNKNOWN = "no cause seen; measure again with moestro doctor --measure"


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Tokens per second."""

    measured: float
    predicted: float

    @property
    def gap(self) -> float:
        """measured over predicted, less one."""
        return self.measured / self.predicted - 1


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a run met: of its ``seconds``, the part of its threads' time that it got the cores, and
    the page faults that had to read from a disk.
    """

    seconds: float
    core_share: float
    major_faults: int


class Watch:
    """Notes the conditions from its making to ``stop``."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._start, self._usage = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)

    def stop(self) -> Conditions:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        seconds = max(1e-9, time.monotonic() - self._start)
        used = usage.ru_utime + usage.ru_stime - self._usage.ru_utime - self._usage.ru_stime
        return Conditions(
            seconds=seconds,
            core_share=used / (seconds * self._threads),
            major_faults=usage.ru_majflt - self._usage.ru_majflt,
        )


class Beside:
    """Predictions for a loaded model on this machine as it was measured."""

    def __init__(self, loaded: Loaded, machine: MachineRates, chunk: int) -> None:
        self._machine, self._chunk = machine, chunk
        self._streams = loaded.plan.streams
        self._model = SpeedModel(loaded.plan.shape, machine, loaded.plan.placed())

    @staticmethod
    def of(loaded: Loaded, *, chunk: int, path: Path) -> Beside | None:
        """None where there is nothing to compare with: the machine was not measured, or with
        another number of threads, another device computes, or experts come from a disk of unknown
        speed. chunk: tokens of a prefill step; path: of the model.
        """
        machine = measured.load().machine(memory=loaded.plan.ram.budget, path=path)
        if machine is None or machine.cpu.threads != loaded.threads:
            return None
        if machine.cpu.isa != loaded.isa or (loaded.plan.streams and machine.disk is None):
            return None
        return Beside(loaded, machine, chunk)

    def prefill(self, tokens: int) -> float:
        """Predicted tokens per second for a prompt of which so many are computed."""
        return self._model.prefill(tokens=tokens, chunk=self._chunk).tokens_per_second

    def decode(self, context: int, tokens: int) -> float:
        """Predicted tokens per second for ``tokens`` after ``context`` others, one sequence."""
        depth = context + tokens // 2
        return self._model.decode(depth=depth, sequences=1).tokens_per_second

    def line(self, completion: Completion, conditions: Conditions) -> str:
        """``predicted 250 tok/s prefill, 12.3 tok/s decode``, with the reason of a large gap."""
        usage, timings = completion.usage, completion.timings
        computed = usage.prompt_tokens - usage.cached_tokens
        parts, speeds = [], []
        if computed > 0 and timings.prefill > 0:
            predicted = self.prefill(computed)
            parts.append(f"{predicted:.1f} tok/s prefill")
            speeds.append(Speeds(measured=computed / timings.prefill, predicted=predicted))
        if usage.completion_tokens > 1 and timings.decode > 0:
            predicted = self.decode(usage.prompt_tokens, usage.completion_tokens)
            parts.append(f"{predicted:.1f} tok/s decode")
            rate = timings.decode_rate(usage.completion_tokens)
            speeds.append(Speeds(measured=rate, predicted=predicted))
        why = self.explain(speeds[-1:], conditions)
        return "predicted " + ", ".join(parts) + (f"; {why}" if why else "") if parts else ""

    def explain(self, speeds: list[Speeds], conditions: Conditions) -> str:
        """Why what was measured is more than a quarter off what was predicted; empty if it is not.
        Reads memory for a moment, to know how fast it is now.
        """
        off = [speed for speed in speeds if abs(speed.gap) > NOTABLE]
        if not off:
            return ""
        worst = max(off, key=lambda speed: abs(speed.gap))
        found = reasons(
            worst, conditions, then=self._machine.cpu.read.median, now=measure.read_now()
        )
        if self._streams:
            found.append("misses were predicted for experts that are all chosen equally often")
        how = "slower" if worst.gap < 0 else "faster"
        return f"{abs(worst.gap):.0%} {how}: " + "; ".join(found or [_UNKNOWN])


def reasons(speed: Speeds, conditions: Conditions, *, then: float, now: float) -> list[str]:
    """What of the conditions points the way of the gap. then, now: bytes per second of memory when
    the machine was measured, and now. Empty where nothing does.
    """
    found = []
    slower = speed.gap < 0
    ratio = now / then
    if (ratio < _OTHER_MEMORY) if slower else (ratio > 1 / _OTHER_MEMORY):
        found.append(
            f"memory reads {now / 1e9:.3g} GB/s now and read {then / 1e9:.3g} GB/s when measured"
        )
    if slower and conditions.core_share < _OWN_CORES:
        found.append(f"other programs took {1 - conditions.core_share:.0%} of the cores' time")
    if slower and conditions.major_faults > _FAULTS_PER_SECOND * conditions.seconds:
        found.append(f"{conditions.major_faults} pages had to be read from disk")
    return found

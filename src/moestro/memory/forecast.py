"""What a plan is worth: how fast it runs and why, what more of anything would buy, a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moestro.core.units import format_bytes
from moestro.machine.rates import MachineRates, Rate
from moestro.memory.model_shape import ModelShape
from moestro.memory.pins import Pin, Tier
from moestro.memory.placement import Counts
from moestro.memory.plan import Budgets, Demand, Plan, make_plan
from moestro.memory.speed import Prediction, SpeedModel

Verdict = Literal["does not fit", "runs", "runs well"]

#: tokens per second of each sequence from which on a model runs well: a little over the speed at
#: which people read (some 250 words a minute)
READING_SPEED = 5.0
#: where speeds are predicted: tokens before the one that is decoded, and of a prompt. Not more than
#: the smallest context, so that less memory never makes the task easier.
DEPTH = 512

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What one unit more of a resource changes, in tokens per second."""

    unit: str
    decode: float
    prefill: float


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """counts_known: whether misses are of measured selections, else of uniform ones. decode_full:
    at the end of the whole context. load_seconds: None without a known disk. not_yet: what this
    version cannot do of the plan; then it is a plan for a later one.
    """

    plan: Plan
    verdict: Verdict
    decode: Prediction
    decode_full: Prediction
    prefill: Prediction
    load_seconds: float | None
    gains: tuple[Gain, ...]
    not_yet: tuple[str, ...]
    sequences: int
    counts_known: bool

    @property
    def runnable(self) -> bool:
        return self.verdict != "does not fit" and not self.not_yet

    @property
    def sentence(self) -> str:
        """The verdict in words, with its threshold and what is in the way."""
        rate = self.decode.tokens_per_second / self.sequences
        each = " for each sequence" if self.sequences > 1 else ""
        if self.verdict == "does not fit":
            lacking = ", ".join(
                f"{format_bytes(tally.missing)} of {_NAMES[tier]}"
                for tier, tally in self.plan.tiers.items()
                if tally.missing
            )
            text = f"does not fit: {lacking} missing"
        elif self.verdict == "runs well":
            text = f"runs well: {rate:.3g} tok/s{each}, {READING_SPEED:g} keep up with reading"
        else:
            text = (
                f"runs: {rate:.3g} tok/s{each}; from {READING_SPEED:g} on, which keep up with "
                "reading, it would run well"
            )
        if self.not_yet:
            text += ". Not with this version: " + "; ".join(self.not_yet)
        return text


_NAMES: Mapping[Tier, str] = {"ram": "RAM", "accelerator": "accelerator memory", "disk": "disk"}


def make_forecast(
    shape: ModelShape,
    machine: MachineRates,
    demand: Demand,
    budgets: Budgets,
    *,
    pins: Sequence[Pin] = (),
    counts: Counts | None = None,
    missing: Mapping[Tier, str] | None = None,
) -> Forecast:
    """Plan and predict. counts: measured selections, for the rate of misses and, where that is
    faster, for which experts go to the faster tier. missing: for tiers that this version does not
    compute from, what is said about it.

    Deterministic; a machine with more or faster of anything never gets a slower forecast. Raises as
    ``make_plan``.
    """
    best = _best(shape, machine, demand, budgets, pins, counts)
    plan, model = best.plan, best.model
    full = max(0, plan.context - 1)
    return Forecast(
        plan=plan,
        verdict=_verdict(plan, best.decode, demand.guaranteed),
        decode=best.decode,
        decode_full=model.decode(depth=full, sequences=demand.guaranteed),
        prefill=best.prefill,
        load_seconds=model.load_seconds(),
        gains=tuple(_gains(best, machine, demand, budgets, pins, counts)) if plan.fits else (),
        not_yet=tuple(text for tier, text in (missing or {}).items() if _uses(plan, tier) and text),
        sequences=demand.guaranteed,
        counts_known=counts is not None,
    )


def _uses(plan: Plan, tier: Tier) -> bool:
    if tier == "disk":
        return plan.streams
    tally = plan.tiers.get(tier)
    return tally is not None and tally.weights + tally.experts > 0


def _verdict(plan: Plan, decode: Prediction, sequences: int) -> Verdict:
    if not plan.fits:
        return "does not fit"
    fast = decode.tokens_per_second / sequences >= READING_SPEED
    return "runs well" if fast else "runs"


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    plan: Plan
    model: SpeedModel
    decode: Prediction
    prefill: Prediction

    def beats(self, other: _Candidate) -> bool:
        """No slower in anything: what is better with some memory must stay so with more."""
        if self.plan.fits != other.plan.fits:
            return self.plan.fits
        return (
            self.decode.tokens_per_second >= other.decode.tokens_per_second
            and self.prefill.tokens_per_second >= other.prefill.tokens_per_second
        )


def _best(
    shape: ModelShape,
    machine: MachineRates,
    demand: Demand,
    budgets: Budgets,
    pins: Sequence[Pin],
    counts: Counts | None,
) -> _Candidate:
    """The plan by the policy that suits, and without the accelerator if it does not help."""
    choices = [budgets]
    pinned = any(pin.tier == "accelerator" for pin in pins)
    if budgets.accelerator is not None and not pinned:
        choices.insert(0, replace(budgets, accelerator=None))
        if not _faster(machine):
            choices.pop()
    best: _Candidate | None = None
    for choice in choices:
        for policy in ("uniform", "frequency") if counts is not None else ("uniform",):
            plan = make_plan(shape, demand, choice, pins=pins, counts=counts, policy=policy)
            found = _predicted(shape, machine, demand, plan, counts)
            if best is None or found.beats(best):
                best = found
    if best is None:
        raise ValueError("there is no way to place a model without a tier")
    return best


def _predicted(
    shape: ModelShape, machine: MachineRates, demand: Demand, plan: Plan, counts: Counts | None
) -> _Candidate:
    model = SpeedModel(shape, machine, plan.placed(counts))
    depth = min(DEPTH, shape.context_length, demand.context or demand.default_context)
    return _Candidate(
        plan=plan,
        model=model,
        decode=model.decode(depth=depth, sequences=demand.guaranteed),
        prefill=model.prefill(tokens=depth, chunk=demand.max_batch_tokens),
    )


def _faster(machine: MachineRates) -> bool:
    """An accelerator that is slower than the CPU in anything is left out."""
    rates, cpu = machine.accelerator, machine.cpu
    if rates is None:
        return False
    kernels = cpu.kernels.values()
    compute = max(cpu.dot, cpu.pairs, *(max(k.one, k.more) for k in kernels))
    read = cpu.read.median * max(1.0, *(k.from_memory for k in kernels), 0.0)
    return rates.read >= read and rates.compute >= compute


def _gains(
    now: _Candidate,
    machine: MachineRates,
    demand: Demand,
    budgets: Budgets,
    pins: Sequence[Pin],
    counts: Counts | None,
) -> list[Gain]:
    """What one unit more of each resource changes."""
    shape = now.plan.shape
    read = machine.cpu.read
    faster_read = Rate(
        median=read.median + 10e9, least=read.least + 10e9, greatest=read.greatest + 10e9
    )
    tries = [
        ("1 GiB RAM", machine, replace(budgets, ram=budgets.ram + _GIB)),
        ("10 GB/s RAM", replace(machine, cpu=replace(machine.cpu, read=faster_read)), budgets),
    ]
    if machine.disk is not None and budgets.disk:
        tries.append(("1 GB/s disk", replace(machine, disk=machine.disk + 1e9), budgets))
    if budgets.accelerator is not None:
        more = replace(budgets, accelerator=budgets.accelerator + _GIB)
        tries.append(("1 GiB accelerator", machine, more))
    gains = []
    for unit, other, given in tries:
        then = _best(shape, other, demand, given, pins, counts)
        gains.append(
            Gain(
                unit=unit,
                decode=then.decode.tokens_per_second - now.decode.tokens_per_second,
                prefill=then.prefill.tokens_per_second - now.prefill.tokens_per_second,
            )
        )
    return gains

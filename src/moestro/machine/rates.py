"""How fast a computer is: what the plan reckons with, measured here or described in a file."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moestro.core.errors import InvalidRequest
from moestro.core.units import parse_bytes

#: of the read bandwidth that a probe finds, products reach this where it was not measured: runs of
#: reading end at every matrix
READ_SHARE = 0.9

_PREFIXES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Per second; median, least and greatest of several measurements at different moments. Memory
    of shared machines flips between two values within seconds, so one measurement says little.
    """

    median: float
    least: float
    greatest: float

    @staticmethod
    def of(samples: Sequence[float]) -> Rate:
        return Rate(median=statistics.median(samples), least=min(samples), greatest=max(samples))

    @staticmethod
    def exactly(value: float) -> Rate:
        return Rate(median=value, least=value, greatest=value)

    @property
    def spread(self) -> float:
        """Greatest over least: 1 for a rate that does not change."""
        return self.greatest / self.least if self.least > 0 else math.inf


@dataclass(frozen=True, kw_only=True)
class KernelRate:
    """Operations per second (two per weight and token) of a format's product with all threads and
    weights at hand: ``one``: of the first token, which pays for decoding the weights; ``more``: of
    each further one. from_memory: bytes per second of products with one token whose weights come
    from memory, as a share of ``CpuRates.read``; more than 1 where kernels read memory better than
    the probe does.
    """

    one: float
    more: float
    from_memory: float


@dataclass(frozen=True, kw_only=True)
class CpuRates:
    """read, read_one: bytes per second of memory with all threads, with one; read_nodes: of each
    NUMA node by its own threads, where there are several. copy: bytes copied per second. dot,
    pairs, fma: operations per second of integer dots, of products of (bfloat16) floats and of
    float32 multiply-adds, with all threads. kernels: by format; of others the plan takes a share of
    ``dot`` or ``pairs``.
    """

    threads: int
    read: Rate
    dot: float
    pairs: float
    fma: float | None = None
    read_one: Rate | None = None
    read_nodes: tuple[Rate, ...] = ()
    copy: Rate | None = None
    isa: str = ""
    kernels: Mapping[str, KernelRate] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AcceleratorRates:
    """memory: bytes of it. read: of it, bytes per second. compute: operations per second in half
    precision. to_device, to_host: bytes per second over the bus from and to pinned memory.
    """

    name: str
    memory: int
    read: float
    compute: float
    to_device: float
    to_host: float


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """memory: bytes that a run may use. disk: bytes per second of random reads of whole experts;
    None: there is no disk to run from. measured: here, else taken from a description.
    """

    name: str
    memory: int
    cpu: CpuRates
    disk: float | None = None
    queue_depth: int = 8
    accelerator: AcceleratorRates | None = None
    measured: bool = False


def describe(raw: Any, where: str) -> MachineRates:
    """A machine from a mapping such as those in ``docs/examples``: sizes as ``512GiB``, rates as
    ``400 GB/s``, ``30 TOP/s`` or ``120 TFLOP/s``, or plain numbers per second.

    Raises InvalidRequest naming ``where`` and the field that is missing, unknown or no such number.
    """
    top = _Fields(raw, where, {"name", "memory", "cpu", "disk", "accelerator"})
    cpu = _Fields(top.get("cpu"), f"{where}: cpu", {"threads", "read", "dot", "pairs"})
    threads = cpu.number("threads")
    accelerator = None
    if top.has("accelerator"):
        found = _Fields(
            top.get("accelerator"),
            f"{where}: accelerator",
            {"name", "memory", "read", "compute", "to_device", "to_host"},
        )
        accelerator = AcceleratorRates(
            name=str(found.get("name")),
            memory=found.size("memory"),
            read=found.number("read"),
            compute=found.number("compute"),
            to_device=found.number("to_device"),
            to_host=found.number("to_host"),
        )
    disk = None
    if top.has("disk"):
        disk = _Fields(top.get("disk"), f"{where}: disk", {"read"}).number("read")
    return MachineRates(
        name=str(top.get("name")),
        memory=top.size("memory"),
        cpu=CpuRates(
            threads=max(1, int(threads)),
            read=Rate.exactly(cpu.number("read")),
            dot=cpu.number("dot"),
            pairs=cpu.number("pairs"),
        ),
        disk=disk,
        accelerator=accelerator,
    )


class _Fields:
    """A mapping whose fields are known by name."""

    def __init__(self, raw: Any, where: str, known: set[str]) -> None:
        if not isinstance(raw, Mapping):
            raise InvalidRequest(f"{where} should hold {', '.join(sorted(known))}")
        unknown = sorted(str(key) for key in raw if key not in known)
        if unknown:
            raise InvalidRequest(
                f"{where}: unknown field {unknown[0]!r}; known are {', '.join(sorted(known))}"
            )
        self._raw, self._where = raw, where

    def has(self, name: str) -> bool:
        return self._raw.get(name) is not None

    def get(self, name: str) -> Any:
        if not self.has(name):
            raise InvalidRequest(f"{self._where}: {name} is missing")
        return self._raw[name]

    def size(self, name: str) -> int:
        value = self.get(name)
        found = value if type(value) is int else parse_bytes(str(value))
        if found < 1:
            raise self._wrong(name, value, "a size such as 64GiB")
        return found

    def number(self, name: str) -> float:
        """Positive, per second if it has a unit."""
        value = self.get(name)
        text = re.fullmatch(
            r"\s*([0-9.]+(?:[eE][+-]?\d+)?)\s*(?:([KMGTP]?)(?:B|OP|FLOP)/s)?\s*", str(value), re.I
        )
        try:
            found = float(text[1]) * _PREFIXES[(text[2] or "").upper()] if text else math.nan
        except ValueError:
            found = math.nan
        if isinstance(value, bool) or not 0 < found < math.inf:
            raise self._wrong(name, value, "a positive rate such as 50 GB/s or 4 TOP/s")
        return found

    def _wrong(self, name: str, value: Any, wanted: str) -> InvalidRequest:
        return InvalidRequest(f"{self._where}: {name} is {value!r}, not {wanted}")


def as_json(rates: CpuRates | AcceleratorRates) -> dict[str, Any]:
    """Plain data; ``cpu_from_json`` and ``accelerator_from_json`` take it back."""
    return asdict(rates)


def cpu_from_json(raw: Any) -> CpuRates:
    """Raises TypeError, KeyError or AttributeError for anything else than ``as_json`` gave."""

    def rate(value: Any) -> Rate:
        return Rate(**{key: float(number) for key, number in value.items()})

    kernels = {str(name): KernelRate(**value) for name, value in raw["kernels"].items()}
    return CpuRates(
        threads=int(raw["threads"]),
        read=rate(raw["read"]),
        dot=float(raw["dot"]),
        pairs=float(raw["pairs"]),
        fma=None if raw["fma"] is None else float(raw["fma"]),
        read_one=None if raw["read_one"] is None else rate(raw["read_one"]),
        read_nodes=tuple(rate(value) for value in raw["read_nodes"]),
        copy=None if raw["copy"] is None else rate(raw["copy"]),
        isa=str(raw["isa"]),
        kernels=kernels,
    )


def accelerator_from_json(raw: Any) -> AcceleratorRates | None:
    """Raises TypeError for anything else than ``as_json`` gave, or None."""
    return None if raw is None else AcceleratorRates(**raw)

"""What was measured of this computer, kept in the cache directory while it holds.

It only ever saves time: a file that is missing, damaged or of other circumstances means that
nothing is known.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from moestro import _core as core
from moestro.core import env, log
from moestro.machine import accelerator, facts
from moestro.machine.cgroups import read_limits
from moestro.machine.disk import DiskFacts
from moestro.machine.rates import (
    AcceleratorRates,
    CpuRates,
    MachineRates,
    accelerator_from_json,
    as_json,
    cpu_from_json,
)

_FILE = "machine.json"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Measured:
    """cpu: None if nothing is known. disks: by what ``disk_key`` says. when: seconds since 1970."""

    cpu: CpuRates | None = None
    accelerator: AcceleratorRates | None = None
    disks: Mapping[str, DiskFacts] = field(default_factory=dict)
    when: float = 0.0

    def disk(self, path: Path) -> DiskFacts | None:
        """What is known of the disk that holds ``path``."""
        return self.disks.get(disk_key(path))

    def machine(self, *, memory: int, path: Path) -> MachineRates | None:
        """For a plan with ``memory`` bytes and a model at ``path``; None if nothing is known."""
        if self.cpu is None:
            return None
        disk = self.disk(path)
        return MachineRates(
            name="this machine",
            memory=memory,
            cpu=self.cpu,
            disk=None if disk is None else disk.read,
            queue_depth=8 if disk is None else disk.queue_depth,
            accelerator=self.accelerator,
            measured=True,
        )


def load() -> Measured:
    """What was kept under the present circumstances; else empty."""
    try:
        content: Any = json.loads((env.cache_dir() / _FILE).read_bytes())
        if content["version"] != _VERSION or content["key"] != _key():
            return Measured()
        return Measured(
            cpu=None if content["cpu"] is None else cpu_from_json(content["cpu"]),
            accelerator=accelerator_from_json(content["accelerator"]),
            disks={str(key): DiskFacts(**value) for key, value in content["disks"].items()},
            when=float(content["when"]),
        )
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return Measured()


def keep(found: Measured) -> Measured:
    """Keep it, beside the disks that are known already; returns all of it. A file that cannot be
    written is said in one line of the log.
    """
    disks = {**load().disks, **found.disks}
    found = replace(found, disks=disks, when=time.time())
    content = {
        "version": _VERSION,
        "key": _key(),
        "when": found.when,
        "cpu": None if found.cpu is None else as_json(found.cpu),
        "accelerator": None if found.accelerator is None else as_json(found.accelerator),
        "disks": {key: asdict(value) for key, value in disks.items()},
    }
    path = env.cache_dir() / _FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place, so that nobody reads half a file.
        handle, written = tempfile.mkstemp(dir=path.parent, prefix=_FILE)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(written, path)
    except OSError as error:
        log.get(__name__).warning("measurements are not kept: %s", error)
    return found


def disk_key(path: Path) -> str:
    """The device that holds ``path`` or its nearest existing parent."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return str(path.stat().st_dev)


def _key() -> str:
    """CPU, threads and limits of this process, kernels, accelerator and versions."""
    machine, limits = facts.gather(), read_limits()
    module = Path(core.__file__).stat()
    parts = {
        "cpu": facts.cpu_identity(),
        "cpus": machine.usable_cpus,
        "quota": limits.cpus,
        "memory": limits.memory,
        "settings": (env.threads(), env.pin(), env.numa_nodes(), env.isa()),
        "build": f"{module.st_size}-{module.st_mtime_ns}",
        "accelerator": accelerator.identity(),
        "torch": torch.__version__,
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items())

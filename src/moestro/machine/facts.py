"""What this computer is and what of it this process may use. Reads files only, changes nothing."""

from __future__ import annotations

import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from moestro.machine.cgroups import read_limits
from moestro.machine.files import cpu_list, numbered, text
from moestro.machine.numa import NumaNode, read_nodes

#: CPU features that decide which kernels run, as the kernel names them in /proc/cpuinfo
_FEATURES = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimddp", "i8mm", "sve",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cache:
    """One CPU cache. size in bytes; instances: how many of them the online CPUs have."""

    level: int
    kind: str
    size: int
    instances: int


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Facts about this computer. All sizes in bytes.

    usable_cpus: logical CPUs in this process's affinity mask. cores: the distinct cores behind
    them, each as its usable CPUs, ascending. cpu_quota: cores' worth of time the control group
    grants, None if unlimited. huge_pages: the system's setting for transparent ones (``always``,
    ``madvise``, ``never``), empty if unknown. memory_available: what can be allocated now without
    swapping, within the control group's limit.
    """

    cpu_model: str
    architecture: str
    features: tuple[str, ...]
    logical_cpus: int
    usable_cpus: tuple[int, ...]
    cores: tuple[tuple[int, ...], ...]
    cpu_quota: float | None
    numa_nodes: tuple[NumaNode, ...]
    huge_pages: str
    caches: tuple[Cache, ...]
    memory_total: int
    memory_available: int
    memory_limit: int | None

    @property
    def physical_cores(self) -> int:
        return len(self.cores)

    @property
    def threads(self) -> int:
        """Compute threads worth starting: one per usable core, no more than the quota pays for."""
        if self.cpu_quota is None:
            return max(1, self.physical_cores)
        return max(1, min(self.physical_cores, int(self.cpu_quota)))


def gather(root: Path = Path("/"), affinity: frozenset[int] | None = None) -> MachineFacts:
    """Read the facts. ``root`` holds ``proc`` and ``sys``; ``affinity`` replaces this process's
    mask (both for tests).
    """
    usable = sorted(os.sched_getaffinity(0) if affinity is None else affinity)
    cpuinfo = text(root / "proc/cpuinfo")
    limits = read_limits(root)
    meminfo = _meminfo(root)
    total = meminfo.get("MemTotal", 0)
    available = meminfo.get("MemAvailable", meminfo.get("MemFree", 0))
    online = cpu_list(text(root / "sys/devices/system/cpu/online")) or usable
    if limits.memory_free is not None:
        available = min(available, limits.memory_free)
    return MachineFacts(
        cpu_model=_field(cpuinfo, "model name") or _field(cpuinfo, "Model") or "unknown",
        architecture=platform.machine(),
        features=_features(cpuinfo),
        logical_cpus=len(online),
        usable_cpus=tuple(usable),
        cores=_cores(root, usable),
        cpu_quota=limits.cpus,
        numa_nodes=read_nodes(root, tuple(usable)),
        huge_pages=_huge_pages(root),
        caches=_caches(root, online),
        memory_total=total if limits.memory is None else min(total, limits.memory),
        memory_available=available,
        memory_limit=limits.memory,
    )


def cpu_identity(root: Path = Path("/")) -> str:
    """What distinguishes this CPU from one that may compute otherwise: model, stepping, microcode
    and the features the kernel lets programs use.
    """
    cpuinfo = text(root / "proc/cpuinfo")
    names = ("model name", "cpu family", "model", "stepping", "microcode", "flags", "Features")
    return "; ".join(_field(cpuinfo, name) for name in names)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be allocated now without swapping, within the control group's limit."""
    free = read_limits(root).memory_free
    meminfo = _meminfo(root)
    available = meminfo.get("MemAvailable", meminfo.get("MemFree", 0))
    return available if free is None else min(available, free)


def disk_free(path: Path) -> int:
    """Free bytes for this user on the file system that holds ``path`` or its nearest existing
    parent.
    """
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _meminfo(root: Path) -> dict[str, int]:
    found = re.findall(r"^(\w+):\s+(\d+) kB", text(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in found}


def _features(cpuinfo: str) -> tuple[str, ...]:
    flags = set((_field(cpuinfo, "flags") or _field(cpuinfo, "Features")).split())
    return tuple(name for name in _FEATURES if name in flags)


def _field(cpuinfo: str, name: str) -> str:
    match = re.search(rf"^{re.escape(name)}\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return match.group(1).strip() if match else ""


def _cores(root: Path, cpus: list[int]) -> tuple[tuple[int, ...], ...]:
    """The CPUs by core: hyper-threads of one core are siblings."""
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = tuple(cpu_list(text(topology / "thread_siblings_list"))) or (cpu,)
        cores.setdefault(siblings, []).append(cpu)
    return tuple(tuple(core) for core in cores.values())


def _huge_pages(root: Path) -> str:
    setting = text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", setting)
    return chosen.group(1) if chosen else ""


def _caches(root: Path, cpus: list[int]) -> tuple[Cache, ...]:
    found: dict[tuple[int, str, int], set[str]] = {}
    for cpu in cpus:
        for index in numbered(root / f"sys/devices/system/cpu/cpu{cpu}/cache", "index"):
            level = text(index / "level").strip()
            size = re.fullmatch(r"(\d+)([KM]?)", text(index / "size").strip())
            if not level.isdigit() or size is None:
                continue
            scale = {"": 1, "K": 2**10, "M": 2**20}[size.group(2)]
            key = (int(level), text(index / "type").strip(), int(size.group(1)) * scale)
            found.setdefault(key, set()).add(text(index / "shared_cpu_list").strip() or str(cpu))
    return tuple(
        Cache(level=level, kind=kind, size=size, instances=len(groups))
        for (level, kind, size), groups in sorted(found.items())
    )

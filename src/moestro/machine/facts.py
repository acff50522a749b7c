"""What this computer is and what of it this process may use. Reads files only, changes nothing."""

from __future__ import annotations

import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from moestro.machine.cgroups import read_limits

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

    usable_cpus: logical CPUs in this process's affinity mask. physical_cores: distinct cores
    behind them. cpu_quota: cores' worth of time the control group grants, None if unlimited.
    memory_available: what can be allocated now without swapping, within the control group's limit.
    """

    cpu_model: str
    architecture: str
    features: tuple[str, ...]
    logical_cpus: int
    usable_cpus: tuple[int, ...]
    physical_cores: int
    cpu_quota: float | None
    numa_nodes: int
    caches: tuple[Cache, ...]
    memory_total: int
    memory_available: int
    memory_limit: int | None

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
    cpuinfo = _text(root / "proc/cpuinfo")
    limits = read_limits(root)
    meminfo = _meminfo(root)
    total = meminfo.get("MemTotal", 0)
    available = meminfo.get("MemAvailable", meminfo.get("MemFree", 0))
    online = _cpu_list(_text(root / "sys/devices/system/cpu/online")) or usable
    if limits.memory_free is not None:
        available = min(available, limits.memory_free)
    return MachineFacts(
        cpu_model=_field(cpuinfo, "model name") or _field(cpuinfo, "Model") or "unknown",
        architecture=platform.machine(),
        features=_features(cpuinfo),
        logical_cpus=len(online),
        usable_cpus=tuple(usable),
        physical_cores=_physical_cores(root, usable),
        cpu_quota=limits.cpus,
        numa_nodes=max(1, len(_numbered(root / "sys/devices/system/node", "node"))),
        caches=_caches(root, online),
        memory_total=total if limits.memory is None else min(total, limits.memory),
        memory_available=available,
        memory_limit=limits.memory,
    )


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
    found = re.findall(r"^(\w+):\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in found}


def _features(cpuinfo: str) -> tuple[str, ...]:
    flags = set((_field(cpuinfo, "flags") or _field(cpuinfo, "Features")).split())
    return tuple(name for name in _FEATURES if name in flags)


def _field(cpuinfo: str, name: str) -> str:
    match = re.search(rf"^{re.escape(name)}\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return match.group(1).strip() if match else ""


def _physical_cores(root: Path, cpus: list[int]) -> int:
    """Distinct sibling groups among ``cpus``; hyper-threads of one core count once."""
    cores: set[tuple[int, ...]] = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _cpu_list(_text(topology / "thread_siblings_list"))
        cores.add(tuple(siblings) or (cpu,))
    return len(cores)


def _caches(root: Path, cpus: list[int]) -> tuple[Cache, ...]:
    found: dict[tuple[int, str, int], set[str]] = {}
    for cpu in cpus:
        for index in _numbered(root / f"sys/devices/system/cpu/cpu{cpu}/cache", "index"):
            level = _text(index / "level").strip()
            size = re.fullmatch(r"(\d+)([KM]?)", _text(index / "size").strip())
            if not level.isdigit() or size is None:
                continue
            scale = {"": 1, "K": 2**10, "M": 2**20}[size.group(2)]
            key = (int(level), _text(index / "type").strip(), int(size.group(1)) * scale)
            found.setdefault(key, set()).add(_text(index / "shared_cpu_list").strip() or str(cpu))
    return tuple(
        Cache(level=level, kind=kind, size=size, instances=len(groups))
        for (level, kind, size), groups in sorted(found.items())
    )


def _cpu_list(text: str) -> list[int]:
    """``"0-2,5"`` -> [0, 1, 2, 5]."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            cpus.extend(range(int(first), int(last if last.isdigit() else first) + 1))
    return cpus


def _numbered(folder: Path, prefix: str) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if re.fullmatch(prefix + r"\d+", p.name))


def _text(path: Path) -> str:
    """The file's text, or nothing where it does not exist or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

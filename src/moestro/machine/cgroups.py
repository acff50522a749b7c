"""Limits that Linux control groups put on this process: CPU quota and memory, versions 1 and 2.

A limit may sit on any ancestor of the process's group, so each lookup walks from the group up to
the mount and keeps the tightest. Inside a container the path in ``/proc/self/cgroup`` may not be
visible; then the mount itself is the container's group. (Kernel documentation: cgroup-v2.rst,
cgroup-v1/memory.rst, scheduler/sched-bwc.rst)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moestro.machine.files import text

# Version 1 says "no limit" with the largest page-aligned 63-bit number.
_UNLIMITED = 1 << 60


@dataclass(frozen=True, kw_only=True)
class CgroupLimits:
    """cpus: quota in cores. memory: limit in bytes. memory_free: what is left under the tightest
    limit, in bytes, counting cache the kernel can drop as free. None means no limit.
    """

    cpus: float | None = None
    memory: int | None = None
    memory_free: int | None = None


def read_limits(root: Path = Path("/")) -> CgroupLimits:
    """The limits of this process. ``root`` holds ``proc`` and ``sys`` (for tests)."""
    cpus: list[float] = []
    memory: list[tuple[int, int]] = []
    for group in _groups(root, "cpu"):
        quota = _cpu_quota(group)
        if quota is not None:
            cpus.append(quota)
    for group in _groups(root, "memory"):
        limit = _memory_limit(group)
        if limit is not None:
            memory.append((limit, limit - _memory_used(group)))
    return CgroupLimits(
        cpus=min(cpus) if cpus else None,
        memory=min(limit for limit, _ in memory) if memory else None,
        memory_free=max(0, min(free for _, free in memory)) if memory else None,
    )


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Directories of the process's groups with this controller, from the leaf to the mount."""
    mounts = root / "sys/fs/cgroup"
    for line in text(root / "proc/self/cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        _, controllers, path = fields
        if controllers == "":
            bases = [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            bases = [mounts / controller, mounts / controllers]
        else:
            continue
        for base in bases:
            if base.is_dir():
                yield from _ancestors(base, path)
                break


def _ancestors(base: Path, path: str) -> Iterator[Path]:
    group = base / path.strip("/")
    while group != base and base in group.parents:
        if group.is_dir():
            yield group
        group = group.parent
    yield base


def _cpu_quota(group: Path) -> float | None:
    fields = text(group / "cpu.max").split()
    if len(fields) != 2:
        fields = [
            text(group / "cpu.cfs_quota_us").strip(),
            text(group / "cpu.cfs_period_us").strip(),
        ]
    quota, period = (_number(field) for field in fields)
    if quota is None or period is None or quota <= 0 or period <= 0:
        return None
    return quota / period


def _memory_limit(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = _number(text(group / name).strip())
        if limit is not None and limit < _UNLIMITED:
            return limit
    return None


def _memory_used(group: Path) -> int:
    for name in ("memory.current", "memory.usage_in_bytes"):
        used = _number(text(group / name).strip())
        if used is not None:
            return max(0, used - _droppable(group))
    return 0


def _droppable(group: Path) -> int:
    """File cache on the inactive list: charged to the group, but given back under pressure."""
    stat = dict(
        line.split(None, 1) for line in text(group / "memory.stat").splitlines() if " " in line
    )
    value = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
    return _number(value.strip()) or 0


def _number(text: str) -> int | None:
    return int(text) if text.lstrip("-").isdigit() else None

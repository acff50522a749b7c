"""NUMA nodes as /sys shows them: which CPUs and how much memory each has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from moestro.machine.files import cpu_list, numbered, text


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """One node with memory. number: what the kernel calls it. cpus: the logical CPUs of it that
    this process may use. Memory in bytes.
    """

    number: int
    cpus: tuple[int, ...]
    memory_total: int
    memory_free: int


def read_nodes(root: Path, usable: tuple[int, ...]) -> tuple[NumaNode, ...]:
    """The online nodes that have memory, ascending; one with all CPUs where /sys shows none."""
    nodes = []
    for folder in numbered(root / "sys/devices/system/node", "node"):
        sizes = dict(re.findall(r"(MemTotal|MemFree):\s+(\d+) kB", text(folder / "meminfo")))
        if sizes.get("MemTotal") == "0":
            continue
        cpus = set(cpu_list(text(folder / "cpulist")))
        nodes.append(
            NumaNode(
                number=int(folder.name.removeprefix("node")),
                cpus=tuple(cpu for cpu in usable if cpu in cpus),
                memory_total=int(sizes.get("MemTotal", 0)) * 1024,
                memory_free=int(sizes.get("MemFree", 0)) * 1024,
            )
        )
    if not nodes:
        nodes = [NumaNode(number=0, cpus=usable, memory_total=0, memory_free=0)]
    return tuple(nodes)

"""Machine facts from fake /proc and /sys trees, and sanity on the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from moestro.machine.cgroups import read_limits
from moestro.machine.facts import available_memory, cpu_identity, disk_free, gather

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(root: Path, extra: dict[str, str] | None = None) -> Path:
    """Two cores of two threads each: siblings (0, 2) and (1, 3); 16 GiB, 8 available."""
    files = {
        "proc/cpuinfo": "processor : 0\nmodel name\t: Test CPU 9000\n"
        "flags\t\t: fpu sse2 avx2 fma f16c avx512f avx512_vnni\n",
        "proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n",
        "sys/devices/system/cpu/online": "0-3\n",
        "sys/devices/system/node/node0/cpulist": "0-3\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    }
    for cpu in range(4):
        base = f"sys/devices/system/cpu/cpu{cpu}"
        files[f"{base}/topology/thread_siblings_list"] = f"{cpu % 2},{cpu % 2 + 2}\n"
        files[f"{base}/cache/index0/level"] = "1\n"
        files[f"{base}/cache/index0/type"] = "Data\n"
        files[f"{base}/cache/index0/size"] = "32K\n"
        files[f"{base}/cache/index0/shared_cpu_list"] = f"{cpu % 2},{cpu % 2 + 2}\n"
        files[f"{base}/cache/index1/level"] = "3\n"
        files[f"{base}/cache/index1/type"] = "Unified\n"
        files[f"{base}/cache/index1/size"] = "8M\n"
        files[f"{base}/cache/index1/shared_cpu_list"] = "0-3\n"
    return write(root, files | (extra or {}))


def test_facts_of_an_unlimited_machine(tmp_path: Path) -> None:
    facts = gather(machine(tmp_path), frozenset(range(4)))
    assert facts.cpu_model == "Test CPU 9000"
    assert facts.features == ("avx2", "fma", "f16c", "avx512f", "avx512_vnni")
    assert (facts.logical_cpus, facts.physical_cores, facts.threads) == (4, 2, 2)
    assert (facts.memory_total, facts.memory_available) == (16 * GIB, 8 * GIB)
    assert facts.memory_limit is None and facts.cpu_quota is None
    assert [(c.level, c.size, c.instances) for c in facts.caches] == [
        (1, 32 * 1024, 2),
        (3, 8 * 2**20, 1),
    ]


def test_cores_and_huge_pages(tmp_path: Path) -> None:
    facts = gather(machine(tmp_path), frozenset({0, 1, 3}))
    assert facts.cores == ((0,), (1, 3))
    assert facts.huge_pages == "madvise"


def test_numa_nodes_have_the_usable_cpus_and_memory(tmp_path: Path) -> None:
    extra = {"sys/devices/system/node/has_cpu": "0-1\n"}
    for node, cpus in ((0, "0,2"), (1, "1,3"), (10, "")):
        base = f"sys/devices/system/node/node{node}"
        extra[f"{base}/cpulist"] = cpus + "\n"
        extra[f"{base}/meminfo"] = (
            f"Node {node} MemTotal:  {node + 1} kB\nNode {node} MemFree:  {node} kB\n"
        )
    extra["sys/devices/system/node/node2/meminfo"] = "Node 2 MemTotal:  0 kB\n"
    nodes = gather(machine(tmp_path, extra), frozenset({0, 1, 2})).numa_nodes
    assert [(n.number, n.cpus) for n in nodes] == [(0, (0, 2)), (1, (1,)), (10, ())]
    assert [(n.memory_total, n.memory_free) for n in nodes] == [
        (1024, 0), (2048, 1024), (11 * 1024, 10 * 1024),
    ]  # fmt: skip


def test_the_cpu_identity_changes_with_the_microcode(tmp_path: Path) -> None:
    seen = set()
    for text in ("model name : A\n", "model name : B\n", "model name : B\nmicrocode : 0x1\n"):
        write(tmp_path, {"proc/cpuinfo": text})
        seen.add(cpu_identity(tmp_path))
    assert len(seen) == 3


def test_affinity_decides_which_cores_count(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert gather(root, frozenset({0, 2})).threads == 1
    assert gather(root, frozenset({0, 1})).threads == 2


@pytest.mark.parametrize(
    ("quota", "threads"), [("100000 100000", 1), ("150000 100000", 1), ("900000 100000", 2)]
)
def test_cpu_quota_v2_bounds_threads(tmp_path: Path, quota: str, threads: int) -> None:
    root = machine(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": quota + "\n"})
    assert gather(root, frozenset(range(4))).threads == threads


def test_a_small_quota_still_gets_one_thread(tmp_path: Path) -> None:
    root = machine(
        tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "20000 100000\n"}
    )
    facts = gather(root, frozenset(range(4)))
    assert facts.cpu_quota == pytest.approx(0.2)
    assert facts.threads == 1


def test_memory_limit_v2_of_an_ancestor_counts(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/outer/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/outer/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        },
    )
    facts = gather(root, frozenset(range(4)))
    assert facts.memory_limit == facts.memory_total == 4 * GIB
    # 4 GiB limit, 3 used, of which 1 is file cache that can be dropped
    assert facts.memory_available == available_memory(root) == 2 * GIB


def test_limits_v1(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n1:cpu,cpuacct:/job\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "250000\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    limits = read_limits(root)
    assert limits.cpus == pytest.approx(2.5)
    assert (limits.memory, limits.memory_free) == (2 * GIB, GIB)


def test_a_group_path_hidden_by_the_container_falls_back_to_the_mount(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod1/c2\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
        },
    )
    assert read_limits(root).memory == GIB


def test_overcommitted_group_has_nothing_left_rather_than_less(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "1000\n",
            "sys/fs/cgroup/memory.current": "1500\n",
        },
    )
    assert available_memory(root) == 0


def test_missing_files_are_unknown_not_a_crash(tmp_path: Path) -> None:
    facts = gather(tmp_path, frozenset({0}))
    assert facts.cpu_model == "unknown"
    assert facts.caches == () and facts.threads == 1
    assert [(n.number, n.cpus) for n in facts.numa_nodes] == [(0, (0,))]


def test_this_machine() -> None:
    facts = gather()
    assert 1 <= facts.threads <= facts.physical_cores <= len(facts.usable_cpus)
    assert 0 < facts.memory_available <= facts.memory_total


def test_disk_free_of_a_path_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert disk_free(tmp_path / "a" / "b") > 0

"""Where threads are placed, on machines that only exist as facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moestro.core.errors import InvalidRequest
from moestro.machine.facts import MachineFacts
from moestro.machine.numa import NumaNode
from moestro.machine.placement import place


def machine(*nodes: list[tuple[int, ...]], quota: float | None = None) -> MachineFacts:
    """A machine whose nodes have these cores, each as its CPUs."""
    cores = tuple(core for node in nodes for core in node)
    cpus = tuple(sorted(cpu for core in cores for cpu in core))
    return MachineFacts(
        cpu_model="",
        architecture="",
        features=(),
        logical_cpus=len(cpus),
        usable_cpus=cpus,
        cores=cores,
        cpu_quota=quota,
        numa_nodes=tuple(
            NumaNode(
                number=4 * i,
                cpus=tuple(cpu for core in node for cpu in core),
                memory_total=0,
                memory_free=0,
            )
            for i, node in enumerate(nodes)
        ),
        huge_pages="",
        caches=(),
        memory_total=0,
        memory_available=0,
        memory_limit=None,
    )


ONE = machine([(0, 4), (1, 5), (2, 6), (3, 7)])
TWO = machine([(0,), (1,), (2,)], [(3,), (4,), (5,)])


def test_a_team_of_all_cores_is_kept_on_them() -> None:
    placed = place(ONE)
    assert (placed.threads, placed.pin) == (4, "core")
    assert placed.cpus == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert placed.nodes == (0, 0, 0, 0) and placed.node_numbers == (0,)


def test_a_smaller_team_leaves_the_choice_of_cores_to_the_system() -> None:
    placed = place(ONE, threads=3)
    assert (placed.threads, placed.pin, placed.cpus) == (3, "none", ((), (), ()))
    assert place(ONE, threads=3, pin="core").cpus == ((0, 4), (1, 5), (2, 6))


def test_a_quota_below_the_cores_means_fewer_threads_that_may_run_anywhere() -> None:
    placed = place(replace(ONE, cpu_quota=2.5))
    assert (placed.threads, placed.pin) == (2, "none")
    placed = place(replace(TWO, cpu_quota=2.5))
    assert (placed.nodes, placed.pin) == ((0, 1), "node")
    assert placed.cpus == ((0, 1, 2), (3, 4, 5))


def test_two_nodes_share_the_threads() -> None:
    placed = place(TWO)
    assert placed.nodes == (0, 0, 0, 1, 1, 1) and placed.node_numbers == (0, 4)
    assert placed.cpus == ((0,), (1,), (2,), (3,), (4,), (5,))
    placed = place(TWO, threads=4)
    assert placed.nodes == (0, 0, 1, 1) and placed.pin == "node"
    placed = place(TWO, threads=1)
    assert (placed.nodes, placed.node_numbers) == ((0,), (0,))


def test_unequal_nodes_get_threads_by_their_cores() -> None:
    unequal = machine([(0,), (1,), (2,), (3,), (4,), (5,)], [(6,), (7,)], [])
    assert place(unequal).nodes == (0,) * 6 + (1,) * 2
    assert place(unequal, threads=4).nodes == (0, 0, 0, 1)
    assert place(unequal).node_numbers == (0, 4)


def test_virtual_nodes() -> None:
    assert place(ONE, numa_nodes=2).nodes == (0, 0, 1, 1)
    assert place(ONE, numa_nodes=2).node_numbers == (0, 0)
    assert place(ONE, threads=3, numa_nodes=4).nodes == (0, 1, 2)
    assert place(TWO, numa_nodes=1).nodes == (0,) * 6
    four = place(TWO, numa_nodes=4)
    assert len(set(four.nodes)) == 4 and four.node_numbers == (0, 0, 4, 4)


@pytest.mark.parametrize("threads", range(1, 20))
@pytest.mark.parametrize("numa_nodes", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("facts", [ONE, TWO])
def test_every_placement_is_a_team(
    facts: MachineFacts, threads: int, numa_nodes: int | None
) -> None:
    placed = place(facts, threads=threads, pin="none", numa_nodes=numa_nodes)
    assert placed.threads == threads == len(placed.cpus)
    assert sorted(placed.nodes) == list(placed.nodes)
    assert sorted(set(placed.nodes)) == list(range(len(placed.node_numbers)))
    assert len(placed.node_numbers) <= min(threads, numa_nodes or 2)


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="pin must be one of auto, core"):
        place(ONE, pin="socket")
    with pytest.raises(InvalidRequest, match="each of 5 threads, but this process may use 4"):
        place(ONE, threads=5, pin="core")
    with pytest.raises(InvalidRequest, match="must be positive"):
        place(ONE, threads=0)
    with pytest.raises(InvalidRequest, match="must be positive"):
        place(ONE, numa_nodes=0)

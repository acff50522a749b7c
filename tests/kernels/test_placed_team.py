"""A team that is placed: sliced over nodes with the same bits, kept on CPUs, honest if not."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import packed_cases as cases
import pytest
import torch

from moestro import devices, native
from moestro.core import log
from moestro.core.errors import InvalidRequest
from moestro.machine import facts
from moestro.machine.files import cpu_list

CPUS = sorted(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def restore_native() -> Iterator[None]:
    threads, own = native.threads(), os.sched_getaffinity(0)
    yield
    native.set_threads(threads)
    assert os.sched_getaffinity(0) == own, "the caller's own affinity must stay as it was"


def on_nodes(*threads: int, cpus: list[tuple[int, ...]] | None = None) -> str:
    """A team with that many threads on each node."""
    nodes = [node for node, count in enumerate(threads) for _ in range(count)]
    return native.set_team(nodes, cpus or [()] * len(nodes), [0] * len(threads))


TEAMS = [(1,), (3,), (1, 1), (2, 1), (1, 3), (1, 1, 1), (1, 1, 1, 1), (2, 2, 2, 2)]


@pytest.mark.parametrize("name", ["int4-g32", "k6", "f32"])
def test_nodes_do_not_change_the_bits_of_a_product(name: str) -> None:
    for rows, cols in ((200, 288), (37, 64), (16, 32)):  # also fewer channels than nodes
        weight = cases.random_weight(name, rows, cols, seed=rows)
        x = torch.randn(140, cols, generator=torch.Generator().manual_seed(1))
        with cases.running(native.isa(), 1):
            expected = cases.linear(weight, x)
            single = cases.linear(weight, x[:1])
        for team in TEAMS:
            on_nodes(*team)
            assert torch.equal(cases.linear(weight, x), expected), (team, rows)
            assert torch.equal(cases.linear(weight, x[:1]), single), (team, rows)


@pytest.mark.parametrize("team", TEAMS)
def test_slices_cover_every_step_in_proportion_to_the_threads(team: tuple[int, ...]) -> None:
    on_nodes(*team)
    for steps in (0, 1, 2, 5, 64, 1000):
        slices = native.node_slices(steps)
        assert len(slices) == len(team)
        assert slices[0][0] == 0 and slices[-1][1] == steps
        assert all(a[1] == b[0] for a, b in pairwise(slices))
        for (first, end), threads in zip(slices, team, strict=True):
            assert abs((end - first) - steps * threads / sum(team)) <= 1


@pytest.mark.parametrize("team", [(2, 1), (1, 1, 1)])
def test_errors_reach_the_caller_from_every_node(team: tuple[int, ...]) -> None:
    on_nodes(*team)
    weight = cases.random_weight("int4-g32", 64, 64)
    out = torch.zeros(2, 64)
    for _ in range(20):
        with pytest.raises(InvalidRequest, match="row count 3"):
            native.core.linear(
                None, torch.zeros(2, 64), "int4-g32", weight.data, 64, 64, out, cases.rows_of(3)
            )
        cases.linear(weight, torch.zeros(2, 64))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "between 1 and 1024, got 0"),
        ([0] * 1025, "between 1 and 1024, got 1025"),
        ([1], "ascend"),
        ([0, 2], "ascend"),
        ([0, 1, 0], "ascend"),
        ([-1], "ascend"),
    ],
)
def test_what_is_no_team_is_refused(nodes: list[int], message: str) -> None:
    before = native.threads()
    with pytest.raises(InvalidRequest, match=message):
        native.set_team(nodes, [()] * len(nodes), [0])
    with pytest.raises(InvalidRequest, match="list of CPUs"):
        native.set_team([0, 0], [()], [0])
    assert native.threads() == before


def kept_on() -> dict[str, str]:
    """Name -> CPUs it may run on, of the team's threads."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            name, status = (task / "comm").read_text().strip(), (task / "status").read_text()
        except OSError:  # ended meanwhile
            continue
        if re.fullmatch(r"moestro-\d+", name):
            lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            found[name] = lines["Cpus_allowed_list"].strip()
    return found


def test_threads_are_kept_on_their_cpus() -> None:
    last = CPUS[-1]
    assert on_nodes(3, cpus=[(CPUS[0],), (last,), ()]) == ""
    seen = kept_on()
    assert set(seen) == {"moestro-1", "moestro-2"}
    assert seen["moestro-1"] == str(last)
    assert cpu_list(seen["moestro-2"]) == CPUS
    weight = cases.random_weight("int4-g32", 64, 64)
    moved = []
    for cpu in CPUS * 2:  # the caller is moved, and free again afterwards
        on_nodes(1, cpus=[(cpu,)])
        cases.linear(weight, torch.zeros(2, 64))
        moved.append(os.sched_getaffinity(0))
    assert moved == [set(CPUS)] * len(moved)


def test_a_caller_with_other_cpus_of_its_own_stays_there() -> None:
    weight, own = cases.random_weight("int4-g32", 64, 64), os.sched_getaffinity(0)
    on_nodes(1, cpus=[(max(CPUS) + 1,)])
    try:
        os.sched_setaffinity(0, {CPUS[0]})
        cases.linear(weight, torch.zeros(2, 64))
        assert os.sched_getaffinity(0) == {CPUS[0]}
    finally:
        os.sched_setaffinity(0, own)


def test_pinning_that_the_system_refuses_is_said_and_the_team_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cpu in (8191, 10_000, -1):
        assert "thread 1 cannot be kept on CPU" in on_nodes(2, cpus=[(), (cpu,)])
        weight = cases.random_weight("int4-g32", 64, 64)
        assert cases.linear(weight, torch.ones(1, 64)).any()
    monkeypatch.setattr(log, "_said", {})
    monkeypatch.setattr(native, "set_team", lambda *_: "thread 1 cannot be kept on CPU 7: why")
    devices.get("cpu").set_threads(1)
    assert "are not pinned: thread 1 cannot be kept on CPU 7: why" in log.fallbacks()["pin"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_placed_team_of_its_own() -> None:
    on_nodes(1, 1, cpus=[(CPUS[0],), (CPUS[-1],)])
    weight, x = cases.random_weight("int4-g32", 64, 64), torch.ones(1, 64)
    expected = cases.linear(weight, x)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            same = torch.equal(cases.linear(weight, x), expected)
            os._exit(0 if same and kept_on() == {"moestro-1": str(CPUS[-1])} else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_device_places_the_team_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    device = devices.get("cpu")
    monkeypatch.setenv("MOESTRO_THREADS", "3")
    monkeypatch.setenv("MOESTRO_NUMA", "2")
    monkeypatch.setenv("MOESTRO_PIN", "none")
    assert device.set_threads() == 3
    assert len(native.node_slices(8)) == 2 == len(native.node_numbers())
    assert device.set_threads(2, numa_nodes=1) == native.threads() == 2
    assert native.node_slices(8) == [(0, 8)]
    monkeypatch.setenv("MOESTRO_PIN", "socket")
    with pytest.raises(InvalidRequest, match="pin must be one of"):
        device.set_threads()
    monkeypatch.setenv("MOESTRO_NUMA", "0")
    with pytest.raises(InvalidRequest, match="MOESTRO_NUMA='0' is not a positive"):
        device.set_threads()


def test_more_threads_than_cores_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_said", {})
    cores = facts.gather().threads
    devices.get("cpu").set_threads(cores)
    assert "threads" not in log.fallbacks()
    devices.get("cpu").set_threads(cores + 1)
    assert f"{cores + 1} threads share {cores} usable cores" in log.fallbacks()["threads"]


def test_pages_come_from_the_node_that_was_asked() -> None:
    memory = native.allocate_bytes(1 << 20)
    node = facts.gather().numa_nodes[0].number
    if native.core.prefer_node(memory, 0, 1 << 20, node) != 0:
        pytest.skip("this system forbids mbind")
    memory[::4096] = 1
    assert native.core.node_of(memory, (1 << 20) - 1) == node
    assert native.core.prefer_node(memory, 0, 1 << 20, -1) == 0
    assert native.core.node_of(memory, 0) == node
    for start, missing in ((0, 1023), (0, 5000), (1, node)):  # no such node; not a page's start
        assert native.core.prefer_node(memory, start, 8192, missing) == errno.EINVAL
    with pytest.raises(InvalidRequest, match="outside the buffer"):
        native.core.prefer_node(memory, 4096, 1 << 20, node)

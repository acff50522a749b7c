"""Which bytes of a buffer belong to which node, and what is done about it."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
import torch

from moestro import formats, native
from moestro.core import log
from moestro.memory import numa
from moestro.memory.arena import HugePageArena, aligned_buffer
from moestro.memory.expert_bank import BlobLayout, ExpertBank
from moestro.memory.numa import Stored, ranges, spread

PAGE = 4096
Asked = list[tuple[int, int, int]]


@pytest.fixture(autouse=True)
def restore_native() -> Iterator[None]:
    threads = native.threads()
    yield
    native.set_threads(threads)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What the kernel was asked for, (start, nbytes, node), on a machine of nodes 0, 4, ..."""
    found: Asked = []

    def prefer_node(data: object, start: int, nbytes: int, node: int) -> int:
        found.append((start, nbytes, node))
        return 0

    monkeypatch.setattr(native.core, "prefer_node", prefer_node)
    return found


def on_nodes(*threads: int) -> list[int]:
    nodes = [node for node, count in enumerate(threads) for _ in range(count)]
    numbers = [4 * node for node in range(len(threads))]
    native.set_team(nodes, [()] * len(nodes), numbers)
    return numbers


@pytest.mark.parametrize("team", [(1, 1), (3, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("rows", [16, 32, 48, 1000, 4096])
@pytest.mark.parametrize("address", [0, 64, 2 << 20, (2 << 20) + 100 * 64])
def test_ranges_are_the_pages_of_the_slices(team: tuple[int, ...], rows: int, address: int) -> None:
    numbers = on_nodes(*team)
    blocks = -(-rows // 16)
    for block_nbytes in (1024, 9 * 1024 + 32, 1 << 16):
        matrix = Stored(start=12800, rows=rows, nbytes=blocks * block_nbytes)
        slices = native.node_slices(-(-rows // 32))
        page = 2 << 20 if matrix.nbytes // len(team) >= 4 << 20 else PAGE
        total = 0
        for start, stop, number in ranges(matrix, address, numbers):
            assert (address + start) % PAGE == 0 == (address + stop) % PAGE and 0 <= start < stop
            first, end = slices[numbers.index(number)]
            exact = [12800 + min(2 * step, blocks) * block_nbytes for step in (first, end)]
            assert 0 <= exact[0] - start < page and 0 <= exact[1] - stop < page
            total += stop - start
        assert abs(total - matrix.nbytes) < page


def test_one_node_asks_for_nothing(asked: Asked) -> None:
    native.set_team([0, 1], [(), ()], [0, 0])  # two virtual nodes of a real one
    spread(aligned_buffer(1 << 20), [Stored(start=0, rows=64, nbytes=1 << 20)])
    assert asked == []


def test_every_expert_is_sliced_and_the_wish_is_dropped_again(asked: Asked) -> None:
    on_nodes(1, 1)
    shapes = [(64, 512), (64, 512), (512, 64)]
    layout = BlobLayout.plan([("f32", n, k) for n, k in shapes])
    bank = ExpertBank(layout, 3)
    *wishes, last = asked
    assert last == (0, bank.nbytes, -1)
    half = formats.get("f32").nbytes(*shapes[0]) // 2
    expected = [
        (expert * layout.nbytes + part * 2 * half + node * half, half, 4 * node)
        for expert in range(3)
        for part in range(3)
        for node in range(2)
    ]
    assert wishes == expected
    assert not bank.buffer.any()


def test_matrices_of_an_arena_are_sliced(asked: Asked) -> None:
    on_nodes(1, 1)
    arena = HugePageArena()
    arena.take(64)
    arena.matrix(16, 64)  # less than a page: nothing to ask for
    assert [wish for wish in asked if wish[2] >= 0] == []
    large = arena.matrix(64, 64 * 1024)
    assert [node for _, _, node in asked if node >= 0] == [0, 4]
    assert not large.any()


def test_a_refusal_is_said_and_the_buffer_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_said", {})
    monkeypatch.setattr(native.core, "prefer_node", lambda *_: errno.EPERM)
    on_nodes(1, 1)
    buffer = aligned_buffer(1 << 20)
    spread(buffer, [Stored(start=0, rows=64, nbytes=1 << 20)])
    assert "Operation not permitted" in log.fallbacks()["numa"]
    assert "numa_nodes=1" in log.fallbacks()["numa"]
    assert not buffer.any()


def test_a_node_that_is_not_there_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_said", {})
    native.set_team([0, 1], [(), ()], [1000, 1001])
    spread(torch.zeros(1 << 20, dtype=torch.uint8), [Stored(start=0, rows=64, nbytes=1 << 20)])
    assert "numa" in log.fallbacks()
    assert numa.core is native.core

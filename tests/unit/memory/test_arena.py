"""Weights on huge pages: alignment, separation, and that nothing is lost on the way."""

from __future__ import annotations

import pytest
import torch

from moestro.core.errors import OutOfBudget
from moestro.machine import facts
from moestro.memory.arena import (
    ALIGNMENT,
    CHUNK_NBYTES,
    HugePageArena,
    aligned_buffer,
    huge_page_nbytes,
)


def test_small_tensors_share_a_chunk_without_overlap() -> None:
    arena = HugePageArena()
    sizes = [1, 63, 64, 65, 1000, 0, 4097]
    tensors = [arena.take(size) for size in sizes]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value + 1)
    for value, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        assert tensor.shape == (size,) and bool((tensor == value + 1).all())
    used = [tensor for tensor in tensors if tensor.numel()]
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in used)
    spread = used[-1].data_ptr() - used[0].data_ptr()
    assert 0 < spread < CHUNK_NBYTES


def test_a_full_chunk_is_followed_by_another() -> None:
    arena = HugePageArena()
    third = CHUNK_NBYTES // 3
    tensors = [arena.take(third) for _ in range(4)]
    for value, tensor in enumerate(tensors):
        tensor[[0, -1]] = value + 1
    assert [int(tensor[0]) for tensor in tensors] == [1, 2, 3, 4]
    assert [int(tensor[-1]) for tensor in tensors] == [1, 2, 3, 4]


def test_large_tensors_have_memory_of_their_own() -> None:
    arena = HugePageArena()
    small, large = arena.take(10), arena.take(CHUNK_NBYTES)
    assert large.data_ptr() % (2 << 20) == 0
    assert arena.take(10).data_ptr() == small.data_ptr() + ALIGNMENT


def test_tensors_outlive_the_arena() -> None:
    data = torch.randint(0, 256, (12345,), dtype=torch.uint8)
    arena = HugePageArena()
    copy = arena.matrix(16, 12345).copy_(data)
    del arena
    assert torch.equal(copy, data)


def test_too_much_is_refused() -> None:
    with pytest.raises(OutOfBudget, match="smaller format"):
        aligned_buffer(1 << 60)


def test_huge_pages_are_counted_as_the_kernel_gives_them() -> None:
    buffer = aligned_buffer(8 << 20)
    before = huge_page_nbytes(buffer)
    buffer.fill_(1)
    assert before <= huge_page_nbytes(buffer)
    assert huge_page_nbytes(buffer) % (2 << 20) == 0
    if facts.gather().huge_pages == "never":
        assert huge_page_nbytes(buffer) == 0

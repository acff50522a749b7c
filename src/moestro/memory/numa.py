"""Pages of weights on the NUMA node whose threads read them.

Nodes compute slices of output channels (see csrc/core/team.h), which are contiguous bytes in every
format. Before a buffer is filled its pages are asked for slice by slice from the node that will
read it, touched, and the wish is dropped again: pages stay where they are, while a wish of its own
for every slice of every expert would exceed the number of mappings the kernel allows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

import moestro._core as core
from moestro import native
from moestro.core import log
from moestro.formats.base import LANES

_PAGE = 4096
_HUGE_PAGE = 2 << 20
#: output channels of one step of a slice: what kernels compute at a time
_STEP = 2 * LANES


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A packed matrix in a buffer: its first byte, its output channels, its size."""

    start: int
    rows: int
    nbytes: int


def spread(buffer: Tensor, matrices: Iterable[Stored]) -> None:
    """Place the pages of a fresh uint8 buffer. Nothing happens on a team of one node; where the
    system refuses, pages stay as they come, and that is said as a fallback.
    """
    numbers = native.node_numbers()
    if len(set(numbers)) == 1 or not buffer.numel():
        return
    for matrix in matrices:
        for start, stop, node in ranges(matrix, buffer.data_ptr(), numbers):
            if not _ask(buffer, start, stop, node):
                return
    first = -buffer.data_ptr() % _PAGE  # what lies before belongs to another buffer's page
    if first < buffer.numel():
        buffer.numpy()[first::_PAGE] = 0
        _ask(buffer, first, buffer.numel(), -1)


def ranges(matrix: Stored, address: int, numbers: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first byte, end, node number) of each slice in a buffer that lies at ``address``, rounded to
    whole pages: huge ones where slices are large enough to fill some.
    """
    blocks = -(-matrix.rows // LANES)
    block_nbytes = matrix.nbytes // blocks
    slices = native.node_slices(-(-matrix.rows // _STEP))
    page = _HUGE_PAGE if matrix.nbytes // len(slices) >= 2 * _HUGE_PAGE else _PAGE
    found = []
    for (first, end), number in zip(slices, numbers, strict=True):
        start, stop = (
            _floor(address + matrix.start + min(2 * step, blocks) * block_nbytes, page) - address
            for step in (first, end)
        )
        # The first page may belong to what lies before this buffer.
        start = max(start, -address % _PAGE)
        if start < stop:
            found.append((start, stop, number))
    return found


def _floor(address: int, page: int) -> int:
    return address // page * page


def _ask(buffer: Tensor, start: int, stop: int, node: int) -> bool:
    error = core.prefer_node(buffer, start, stop - start, node)
    if error:
        log.warn_once(
            "numa",
            f"weights are not placed on the NUMA nodes that read them: {os.strerror(error)}; "
            "a container may need CAP_SYS_NICE or another seccomp profile, numa_nodes=1 turns "
            "slicing off",
        )
    return not error

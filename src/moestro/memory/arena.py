"""Memory for weights and caches, on huge pages; small matrices share chunks of them.

Decoding streams every dense weight once per token; on 4 KiB pages that costs about a sixth of the
bandwidth in page walks.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from moestro import native
from moestro.core.errors import OutOfBudget
from moestro.core.units import format_bytes
from moestro.formats.base import round_up
from moestro.memory.numa import Stored, spread

#: bytes taken from the system at a time; larger tensors get memory of their own
CHUNK_NBYTES = 32 << 20
#: start of each tensor: a cache line
ALIGNMENT = 64


def aligned_buffer(nbytes: int) -> Tensor:
    """A zeroed uint8 tensor [nbytes] on huge pages where the system gives them, aligned to 2 MiB.

    Raises OutOfBudget when the system does not give that much memory.
    """
    try:
        return torch.from_numpy(native.allocate_bytes(max(nbytes, 1)))[:nbytes]
    except MemoryError as error:
        raise OutOfBudget(
            f"{format_bytes(nbytes)} for weights or the KV cache cannot be allocated; choose a "
            "smaller format or a smaller context"
        ) from error


def huge_page_nbytes(data: Tensor) -> int:
    """Bytes of huge pages in the mappings that hold ``data``, as the kernel counts them now."""
    start, stop = data.data_ptr(), data.data_ptr() + data.numel() * data.element_size()
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, last = (int(end, 16) for end in mapping.groups())
            inside = first < stop and start < last
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) * 1024
    return found


class HugePageArena:
    """Hands out uint8 tensors on huge pages. Nothing is returned before all tensors of a chunk are
    gone, so it is for weights, which live as long as their model.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, nbytes: int) -> Tensor:
        """A zeroed uint8 tensor [nbytes]. Raises OutOfBudget when there is no memory for it."""
        if nbytes > CHUNK_NBYTES // 2:
            return aligned_buffer(nbytes)
        if self._used + nbytes > self._chunk.numel():
            self._chunk, self._used = aligned_buffer(CHUNK_NBYTES), 0
        start = self._used
        self._used = round_up(start + nbytes, ALIGNMENT)
        return self._chunk[start : start + nbytes]

    def matrix(self, rows: int, nbytes: int) -> Tensor:
        """``take`` for a packed matrix of so many output channels: its pages come from the NUMA
        nodes that read them.
        """
        out = self.take(nbytes)
        spread(out, [Stored(start=0, rows=rows, nbytes=nbytes)])
        return out

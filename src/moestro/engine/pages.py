"""The pool of KV cache pages: who may write where. Every page has at most one owner."""

from __future__ import annotations

from collections.abc import Sequence

from moestro.core.errors import OutOfBudget


class PagePool:
    """Page numbers 0..total-1, handed out lowest first after a fresh start."""

    def __init__(self, *, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self._free = list(range(total - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    def pages_for(self, positions: int) -> int:
        """Pages that hold this many positions."""
        return -(-positions // self.page_size)

    def take(self, count: int) -> list[int]:
        """Hand out ``count`` pages, or none and raise OutOfBudget with the numbers."""
        if count > self.free:
            raise OutOfBudget(
                f"{count} KV pages of {self.page_size} positions are needed, {self.free} of "
                f"{self.total} are free; lower context or max_sequences, or raise the memory budget"
            )
        pages = [self._free.pop() for _ in range(count)]
        self._taken.update(pages)
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """Return pages. Returning one that is not out is a bug and raises ValueError."""
        for page in pages:
            if page not in self._taken:
                raise ValueError(f"KV page {page} is not handed out")
            self._taken.remove(page)
            self._free.append(page)

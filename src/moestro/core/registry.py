"""A name -> thing table with an error that lists what exists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from moestro.core.errors import MoestroError

T = TypeVar("T")


class Registry(Generic[T]):
    """Registered things by name; a miss raises the given error type with the known names."""

    def __init__(self, what: str, error: type[MoestroError]) -> None:
        self.what = what
        self._error = error
        self._items: dict[str, T] = {}

    def add(self, name: str, item: T) -> T:
        if name in self._items:
            raise ValueError(f"{self.what} {name!r} is registered twice")
        self._items[name] = item
        return item

    def get(self, name: str) -> T:
        try:
            return self._items[name]
        except KeyError:
            known = ", ".join(sorted(self._items))
            raise self._error(f"unknown {self.what} {name!r}; known: {known}") from None

    def names(self) -> list[str]:
        return sorted(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

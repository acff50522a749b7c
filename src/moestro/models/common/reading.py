"""Reading configurations: every value checked, every missing or unsupported one named."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from moestro.core.errors import CheckpointError, UnsupportedArchitecture

# No size of a model comes near it; a corrupt file must not make us count that far.
_LARGEST = 2**31 - 1


class Reader:
    """Typed access to a configuration's values.

    source: what error messages call it. prefix: put before every name (GGUF's architecture).
    A value of None reads as absent.
    """

    def __init__(self, values: Mapping[str, Any], *, source: str, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self.prefix = prefix

    def get(self, *names: str) -> Any:
        """The value of the first name that is present, else None."""
        for name in names:
            value = self.values.get(self.prefix + name)
            if value is not None:
                return value
        return None

    def integer(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number; CheckpointError if absent without default, or out of all proportion."""
        value = self._present(names, default)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not minimum <= value <= _LARGEST:
            raise self.wrong(names[0], value, f"a whole number of at least {minimum}")
        return int(value)

    def number(self, *names: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._present(names, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (math.isfinite(value) and value > 0):
            raise self.wrong(names[0], value, "a positive number")
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        value = self._present(names, default)
        if not isinstance(value, bool):
            raise self.wrong(names[0], value, "true or false")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers, or one alone; empty if absent."""
        value = self.get(name)
        items = () if value is None else value if isinstance(value, Sequence) else (value,)
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self.wrong(name, value, "whole numbers")
        return tuple(items)

    def refuse(self, name: str, *harmless: Any) -> None:
        """Raise UnsupportedArchitecture if the option is present with another value."""
        value = self.get(name)
        if value is not None and value not in harmless:
            raise self.unsupported(name, value, "supported: " + (_or(harmless) or "leaving it out"))

    def unsupported(self, name: str, value: Any, hint: str) -> UnsupportedArchitecture:
        return UnsupportedArchitecture(
            f"{self.source}: {self.prefix}{name} = {value!r} is not implemented; {hint}"
        )

    def wrong(self, name: str, value: Any, want: str) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: {self.prefix}{name} is {value!r}, it should be {want}"
        )

    def _present(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.get(*names)
        if value is None:
            value = default
        if value is None:
            wanted = _or(tuple(self.prefix + name for name in names))
            raise CheckpointError(f"{self.source}: {wanted} is missing")
        return value


def hf_reader(raw: Mapping[str, Any], model_type: str) -> Reader:
    return Reader(raw, source=f"config.json of this {model_type} model")


def gguf_reader(metadata: Mapping[str, Any], architecture: str) -> Reader:
    return Reader(metadata, source="the GGUF metadata", prefix=f"{architecture}.")


def _or(values: Sequence[Any]) -> str:
    return " or ".join(str(value) for value in values)

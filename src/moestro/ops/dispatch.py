"""How an op call finds its implementation on a device, and how it is recorded.

A device's ops written in Python derive from ``PythonOps`` and mark each op with ``@op``: while a
program is open the call is kept, else it runs at once. An op that a device lacks raises
UnsupportedOp by name instead of AttributeError, on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, NoReturn, ParamSpec, TypeVar

from moestro.core.errors import UnsupportedOp
from moestro.ops.contracts import Ops

OP_NAMES = frozenset(name for name in vars(Ops) if not name.startswith("_")) - {"record"}

_Self = TypeVar("_Self", bound="PythonOps")
_Args = ParamSpec("_Args")


class ClosureProgram:
    """Recorded op calls, replayed in order."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._calls)

    def append(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def replay(self) -> None:
        for call in self._calls:
            call()


def unsupported(name: str, device: str, implemented: frozenset[str]) -> UnsupportedOp:
    """The error for an op that a device does not implement."""
    return UnsupportedOp(
        f"device {device} does not implement the op {name!r}; it has: "
        f"{', '.join(sorted(implemented & OP_NAMES))}"
    )


class PythonOps:
    """Base of op tables written in Python: recording, and UnsupportedOp for what is missing."""

    #: name of the device these ops run on, for error messages
    device = "python"

    def __init__(self) -> None:
        self._program: ClosureProgram | None = None

    @contextmanager
    def record(self) -> Iterator[ClosureProgram]:
        """While open, ops are recorded into the yielded program and not run.

        Raises UnsupportedOp when a program is already open: recordings do not nest.
        """
        if self._program is not None:
            raise UnsupportedOp(f"device {self.device} is already recording a program")
        self._program = ClosureProgram()
        try:
            yield self._program
        finally:
            self._program = None

    def __getattr__(self, name: str) -> NoReturn:
        if name in OP_NAMES:
            raise unsupported(name, self.device, frozenset(dir(type(self))))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def op(
    method: Callable[Concatenate[_Self, _Args], None],
) -> Callable[Concatenate[_Self, _Args], None]:
    """Mark a method of a PythonOps as an op: recorded while a program is open."""

    @wraps(method)
    def call(self: _Self, /, *args: _Args.args, **kwargs: _Args.kwargs) -> None:
        program = self._program
        if program is None:
            method(self, *args, **kwargs)
        else:
            program.append(lambda: method(self, *args, **kwargs))

    return call

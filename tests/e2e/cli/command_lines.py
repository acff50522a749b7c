"""What the tests of the commands have in common to write."""

from __future__ import annotations

from collections.abc import Callable

REFERENCE = ("--device", "reference", "--threads", "1")
GREEDY = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos")

#: a command line to (exit code, stdout, stderr); stdin= bytes
Run = Callable[..., tuple[int, str, str]]

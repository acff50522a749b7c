"""Which formats passed the self-check on this CPU with this build: a file in the cache directory.

It only ever saves time: a file that is missing, damaged, of another CPU or build, or that cannot be
written, means that the check runs again.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestro import _core as core
from moestro.core import env, log
from moestro.machine import facts

_FILE = "self-check.json"


@dataclass(frozen=True, kw_only=True)
class PassedCache:
    """key: what CPU and build the results are of. passed: instruction set -> format names."""

    path: Path
    key: str
    passed: dict[str, set[str]]

    @staticmethod
    def open() -> PassedCache:
        """The results of this CPU and build; none if there are no usable ones."""
        path, key = env.cache_dir() / _FILE, _key()
        return PassedCache(path=path, key=key, passed=_read(path, key))

    def has(self, format_name: str, isa: str) -> bool:
        return format_name in self.passed.get(isa, ())

    def add(self, format_names: Iterable[str], isa: str) -> None:
        """Remember that these passed. A file that cannot be written is no error."""
        known = self.passed.setdefault(isa, set())
        if known.issuperset(format_names):
            return
        known.update(format_names)
        content = {"key": self.key, "passed": {i: sorted(n) for i, n in self.passed.items()}}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Renamed into place, so that nobody reads half a file.
            handle, written = tempfile.mkstemp(dir=self.path.parent, prefix=_FILE)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(written, self.path)
        except OSError as error:
            log.get(__name__).info("self-check results are not kept: %s", error)


def _key() -> str:
    """The CPU as it names itself, and the native module's file: both change what kernels give."""
    module = Path(core.__file__).stat()
    return f"{facts.cpu_identity()}; build {module.st_size}-{module.st_mtime_ns}"


def _read(path: Path, key: str) -> dict[str, set[str]]:
    try:
        content: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict) or content.get("key") != key:
        return {}
    passed = content.get("passed")
    if not isinstance(passed, dict):
        return {}
    return {
        isa: {name for name in names if isinstance(name, str)}
        for isa, names in passed.items()
        if isinstance(isa, str) and isinstance(names, list)
    }

"""Reading what the kernel shows in /proc and /sys."""

from __future__ import annotations

import re
from pathlib import Path


def text(path: Path) -> str:
    """The file's text, or nothing where it does not exist or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cpu_list(listed: str) -> list[int]:
    """``"0-2,5"`` -> [0, 1, 2, 5]."""
    cpus: list[int] = []
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            cpus.extend(range(int(first), int(last if last.isdigit() else first) + 1))
    return cpus


def numbered(folder: Path, prefix: str) -> list[Path]:
    """Entries called ``prefix`` and a number, in the order of the numbers."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if re.fullmatch(prefix + r"\d+", p.name)]
    return sorted(found, key=lambda p: int(p.name.removeprefix(prefix)))

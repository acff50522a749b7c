"""Parsing and printing of byte sizes and rates."""

from __future__ import annotations

import re

from moestro.core.errors import InvalidRequest

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """``"24GiB"`` -> bytes. Raises InvalidRequest for anything else."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match.group(2).upper() not in _UNITS:
        raise InvalidRequest(f"{text!r} is not a size; write for example 24GiB or 800MB")
    return int(float(match.group(1)) * _UNITS[match.group(2).upper()])


def format_bytes(n: float) -> str:
    """Bytes in binary units with three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} TiB"


def format_rate(n: float) -> str:
    """Bytes per second in decimal units, as drives and memory are sold: ``37.2 GB/s``."""
    for unit in ("B/s", "kB/s", "MB/s", "GB/s"):
        if abs(n) < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB/s"

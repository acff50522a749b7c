"""The only reader of environment variables. Each variable is defined here once."""

from __future__ import annotations

import os
from pathlib import Path

from moestro.core.errors import InvalidRequest


def isa() -> str | None:
    """``MOESTRO_ISA``: force one instruction set (``scalar``, ``avx2``, ...)."""
    return os.environ.get("MOESTRO_ISA") or None


def threads() -> int | None:
    """``MOESTRO_THREADS``: number of compute threads."""
    return _positive("MOESTRO_THREADS")


def pin() -> str | None:
    """``MOESTRO_PIN``: where compute threads are kept (see ``machine.placement.PINS``)."""
    return os.environ.get("MOESTRO_PIN") or None


def numa_nodes() -> int | None:
    """``MOESTRO_NUMA``: number of NUMA nodes that weights are sliced over."""
    return _positive("MOESTRO_NUMA")


def log_level() -> str:
    """``MOESTRO_LOG``: debug, info, warning (default) or error."""
    return os.environ.get("MOESTRO_LOG", "warning").upper()


def cache_dir() -> Path:
    """``MOESTRO_CACHE``, else ``$XDG_CACHE_HOME/moestro``, else ``~/.cache/moestro``."""
    own = os.environ.get("MOESTRO_CACHE")
    if own:
        return Path(own)
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "moestro"


def hub_offline() -> bool:
    """``HF_HUB_OFFLINE``: never touch the network for a hub id."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}


def _positive(name: str) -> int | None:
    raw = os.environ.get(name)
    if not raw:
        return None
    if not raw.isdigit() or int(raw) < 1:
        raise InvalidRequest(f"{name}={raw!r} is not a positive whole number")
    return int(raw)

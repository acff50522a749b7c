"""Logging: one logger tree, and ``warn_once`` for fallbacks, which ``doctor`` can list."""

from __future__ import annotations

import logging

from moestro.core import env

_ROOT = "moestro"
_said: dict[str, str] = {}


def get(name: str) -> logging.Logger:
    """Return the logger of a module (pass ``__name__``)."""
    root = logging.getLogger(_ROOT)
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
        level = logging.getLevelName(env.log_level())
        root.setLevel(level if isinstance(level, int) else logging.WARNING)
        root.propagate = False
    return logging.getLogger(name)


def warn_once(key: str, message: str) -> None:
    """Log a fallback once per process and remember it for ``fallbacks()``."""
    if key not in _said:
        _said[key] = message
        get(_ROOT).warning(message)


def fallbacks() -> dict[str, str]:
    """All fallbacks said so far, by key."""
    return dict(_said)

"""Finds devices by name: each is a folder here with a function ``open_device() -> Device``.

A folder is imported only when it is asked for, so a device whose libraries are missing costs
nothing to those who do not use it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from moestro.core.errors import InvalidRequest
from moestro.devices.base import Device


def names() -> list[str]:
    """Names of all devices this installation has, whether or not this machine can run them."""
    return sorted(module.name for module in iter_modules(__path__) if module.ispkg)


@cache
def get(name: str) -> Device:
    """The device called ``name``; the same object each time.

    Raises InvalidRequest listing the known names if there is no such device, and whatever the
    device itself raises when this machine cannot run it.
    """
    if name not in names():
        raise InvalidRequest(f"unknown device {name!r}; known: {', '.join(names())}")
    module = import_module(f"{__name__}.{name}")
    device: Device = module.open_device()
    return device

"""Registries: what a miss says, and that nothing is registered twice."""

from __future__ import annotations

import pytest

from moestro.core.errors import UnsupportedFormat
from moestro.core.registry import Registry


def test_a_miss_lists_what_there_is():
    registry: Registry[int] = Registry("colour", UnsupportedFormat)
    registry.add("red", 1)
    registry.add("blue", 2)
    assert registry.get("red") == 1
    assert list(registry) == registry.names() == ["blue", "red"]
    assert "red" in registry and "green" not in registry
    with pytest.raises(UnsupportedFormat, match=r"unknown colour 'green'; known: blue, red"):
        registry.get("green")


def test_a_name_is_taken_once():
    registry: Registry[int] = Registry("colour", UnsupportedFormat)
    registry.add("red", 1)
    with pytest.raises(ValueError, match="twice"):
        registry.add("red", 2)
    assert registry.get("red") == 1

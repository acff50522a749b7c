"""Fallbacks are said once and remembered."""

from __future__ import annotations

import io
import logging

import pytest

from moestro.core import log


@pytest.fixture
def said(monkeypatch):
    """What the logger of the package writes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    root = log.get("moestro")
    monkeypatch.setattr(log, "_said", {})
    root.addHandler(handler)
    yield stream
    root.removeHandler(handler)


def test_a_fallback_is_said_once(said):
    log.warn_once("numa", "no NUMA here")
    log.warn_once("numa", "no NUMA here, again")
    assert said.getvalue() == "no NUMA here\n"
    assert log.fallbacks() == {"numa": "no NUMA here"}


def test_fallbacks_are_a_copy(said):
    log.fallbacks()["x"] = "y"
    assert log.fallbacks() == {}


def test_module_loggers_hang_below_the_package():
    assert log.get("moestro.engine.engine").parent is not logging.getLogger()
    assert logging.getLogger("moestro").propagate is False

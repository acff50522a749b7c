"""Environment variables: what each means, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from moestro.core import env
from moestro.core.errors import InvalidRequest


def test_unset_or_empty_means_no_choice(monkeypatch):
    for name in ("MOESTRO_ISA", "MOESTRO_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert (env.isa(), env.threads()) == (None, None)
    for name in ("MOESTRO_ISA", "MOESTRO_THREADS"):
        monkeypatch.setenv(name, "")
    assert (env.isa(), env.threads()) == (None, None)


def test_chosen_values_are_read_each_time(monkeypatch):
    monkeypatch.setenv("MOESTRO_ISA", "avx2")
    monkeypatch.setenv("MOESTRO_THREADS", "3")
    monkeypatch.setenv("MOESTRO_LOG", "debug")
    assert (env.isa(), env.threads(), env.log_level()) == ("avx2", 3, "DEBUG")
    monkeypatch.setenv("MOESTRO_THREADS", "4")
    assert env.threads() == 4


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", " "])
def test_impossible_thread_counts_are_refused_by_value(monkeypatch, value):
    monkeypatch.setenv("MOESTRO_THREADS", value)
    with pytest.raises(InvalidRequest, match="MOESTRO_THREADS"):
        env.threads()


def test_the_cache_follows_its_own_variable_then_the_desktop_standard(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("MOESTRO_CACHE", "/own")
    assert env.cache_dir() == Path("/own")
    monkeypatch.delenv("MOESTRO_CACHE")
    assert env.cache_dir() == Path("/xdg/moestro")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert env.cache_dir() == Path("/home/someone/.cache/moestro")


@pytest.mark.parametrize(("value", "offline"), [("1", True), ("TRUE", True), ("0", False)])
def test_offline(monkeypatch, value, offline):
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert env.hub_offline() is offline

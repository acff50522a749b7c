"""EngineConfig: every knob is checked, documented and known by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from moestro.core.errors import InvalidRequest
from moestro.engine.config import EngineConfig


def test_every_knob_has_help() -> None:
    assert all(len(f.metadata["help"]) > 20 for f in fields(EngineConfig))


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("context", 0),
        ("context", 1),
        ("max_sequences", 0),
        ("max_batch_tokens", -5),
        ("max_batch_tokens", 2.5),
        ("max_sequences", True),
        ("page_size", 24),
        ("kv_dtype", "int3"),
        ("threads", 0),
        ("same_bits", "yes"),
        ("memory", "lots"),
        ("memory", 24),
        ("accelerator_memory", 24),
        ("accelerator_memory", "lots"),
        ("placement", "frequency"),
        ("expert_pins", "layers.0.experts=ram"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(knob: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{knob}|'lots' is not a size"):
        EngineConfig(**{knob: value})


def test_a_step_must_hold_a_token_of_every_sequence() -> None:
    with pytest.raises(InvalidRequest, match=r"max_batch_tokens \(4\).*max_sequences \(8\)"):
        EngineConfig(max_batch_tokens=4)


def test_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match=r"'max_sequence'; did you mean 'max_sequences'"):
        EngineConfig.from_options({"max_sequence": 3})


def test_memory_budget_in_bytes() -> None:
    assert EngineConfig(memory="24GiB").memory_bytes() == 24 * 2**30
    assert EngineConfig().memory_bytes() is None
    assert EngineConfig(accelerator_memory="10GB").accelerator_bytes() == 10**10
    assert EngineConfig().accelerator_bytes() is None


def test_pins_are_read_when_options_are() -> None:
    with pytest.raises(InvalidRequest, match=r"'gpu' .* is not a tier"):
        EngineConfig(expert_pins=("layers.0.experts=gpu",))

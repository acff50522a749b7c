"""Described machines, and rates as plain data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from moestro.core.errors import InvalidRequest
from moestro.machine.rates import (
    CpuRates,
    KernelRate,
    Rate,
    as_json,
    cpu_from_json,
    describe,
)

GOOD = {
    "name": "a machine",
    "memory": "64GiB",
    "cpu": {"threads": 16, "read": "80 GB/s", "dot": "5 TOP/s", "pairs": "2TFLOP/s"},
}
EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"


def test_units_are_read() -> None:
    found = describe(GOOD | {"disk": {"read": 3.5e9}}, "here")
    assert found.memory == 64 * 2**30
    assert (found.cpu.read.median, found.cpu.dot, found.cpu.pairs) == (80e9, 5e12, 2e12)
    assert found.disk == 3.5e9 and found.accelerator is None and not found.measured


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_describe_machines(path: Path) -> None:
    found = describe(yaml.safe_load(path.read_text()), str(path))
    assert found.accelerator is not None and found.disk is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": None}, "memory is missing"),
        ({"memory": "much"}, "not a size"),
        ({"cores": 3}, "unknown field 'cores'"),
        ({"cpu": 5}, "should hold"),
        ({"cpu": GOOD["cpu"] | {"read": "fast"}}, "positive rate"),
        ({"cpu": GOOD["cpu"] | {"dot": -1}}, "positive rate"),
        ({"cpu": GOOD["cpu"] | {"dot": True}}, "positive rate"),
        ({"disk": {"read": "1..2 GB/s"}}, "positive rate"),
        ({"accelerator": {"name": "card"}}, "memory is missing"),
    ],
)
def test_what_is_no_machine_is_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        describe(GOOD | change, "here")


def test_a_list_is_no_machine() -> None:
    with pytest.raises(InvalidRequest, match="here should hold"):
        describe([1, 2], "here")


def test_rates_survive_json() -> None:
    rates = CpuRates(
        threads=2,
        isa="scalar",
        read=Rate.of([3.0, 1.0, 2.0]),
        read_one=Rate.exactly(1.0),
        read_nodes=(Rate.exactly(2.0),),
        copy=None,
        dot=4.0,
        pairs=5.0,
        kernels={"any": KernelRate(one=1.0, more=2.0, from_memory=0.5)},
    )
    assert cpu_from_json(json.loads(json.dumps(as_json(rates)))) == rates
    assert rates.read == Rate(median=2.0, least=1.0, greatest=3.0) and rates.read.spread == 3

"""The self-check: that right kernels pass, that wrong ones are found, and what is remembered."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from moestro import devices, formats, native
from moestro.core.errors import SelfCheckError, UnsupportedOp
from moestro.devices.cpu import self_check, self_check_cache

KERNELS = [name for name in formats.names() if name in native.core.format_names()]
INTEGER = [name for name in KERNELS if not formats.get(name).is_float]
ISAS = native.supported_isas()


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("MOESTRO_CACHE", str(tmp_path))
    monkeypatch.setattr(self_check, "_passed", set())
    self_check._case.cache_clear()
    yield
    self_check._case.cache_clear()


def break_kernels(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], object], *, isa: str = ISAS[-1]
) -> None:
    """From now on kernels of one instruction set give what ``change`` makes of their output."""
    right = native.core.multiply

    def multiply(table: str, x: Tensor, name: str, data: Tensor, n: int, k: int, out: Tensor):
        right(table, x, name, data, n, k, out)
        if table == isa:
            change(out)

    monkeypatch.setattr(native.core, "multiply", multiply)


def test_every_kernel_of_this_machine_passes() -> None:
    table = self_check.table()
    assert list(table) == ISAS
    for isa, row in table.items():
        assert sorted(row) == sorted(KERNELS)
        assert {name: str(d) for name, d in row.items() if d is not None} == {}, isa


def set_last(value: float) -> Callable[[Tensor], object]:
    return lambda out: out[-1, -1].fill_(value)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (set_last(float("nan")), "token 0 of 1, channel 38: nan instead of "),
        (set_last(float("inf")), "token 0 of 1, channel 38: inf instead of "),
        (lambda out: out.copy_(out.roll(1, 1)), "token 0 of 1, channel 0: "),
        (lambda out: out[0].mul_(1.001), "token 0 of 1, channel"),
        (lambda out: out[:, 32:].zero_(), "token 0 of 1, channel 32: 0 instead of "),
        (lambda out: out.zero_() if len(out) == 37 else 0, "token 0 of 37, channel 0: 0 instead"),
        (lambda out: out[20:].zero_(), "token 20 of 37, channel 0: 0 instead of "),
    ],
)
@pytest.mark.parametrize("name", ["f32", "int4-g32"])
def test_the_first_wrong_element_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Tensor], object], where: str
) -> None:
    break_kernels(monkeypatch, change)
    found = self_check.first_difference(name, ISAS[-1])
    assert found is not None
    assert (found.format_name, found.isa) == (name, ISAS[-1])
    assert where in str(found)


def test_integer_formats_must_have_the_plainest_kernels_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def last_bit(out: Tensor) -> None:
        out[0, 5] = torch.nextafter(out[0, 5], torch.tensor(torch.inf))

    break_kernels(monkeypatch, last_bit)
    if ISAS[-1] != native.built_isas()[0]:
        found = self_check.first_difference("int4-g32", ISAS[-1])
        assert found is not None and (found.token, found.channel) == (0, 5)
    assert self_check.first_difference("f32", ISAS[-1]) is None


@pytest.mark.parametrize("name", INTEGER)
def test_one_wrong_code_of_a_weight_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, case = formats.get(name), self_check._case(name)
    random = np.random.default_rng(0)
    right = native.core.multiply
    before = weight.unpack(case.data, self_check._ROWS, self_check._COLS)
    for _ in range(3):
        while True:
            spoiled = case.data.clone()
            at = random.integers(spoiled.numel() // 2, spoiled.numel())
            spoiled[at] ^= 1 << int(random.integers(8))
            after = weight.unpack(spoiled, self_check._ROWS, self_check._COLS)
            if not torch.equal(after, before):
                break

        def multiply(
            isa: str, x: Tensor, name: str, _: Tensor, n: int, k: int, out: Tensor,
            spoiled: Tensor = spoiled,
        ) -> None:  # fmt: skip
            right(isa, x, name, spoiled, n, k, out)

        monkeypatch.setattr(native.core, "multiply", multiply)
        assert self_check.first_difference(name, ISAS[-1]) is not None


def test_the_error_names_the_way_out_and_nothing_is_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    break_kernels(monkeypatch, lambda out: out.zero_())
    message = f"format f32 on instruction set {re.escape(ISAS[-1])} .*instead of"
    for _ in range(2):
        with pytest.raises(SelfCheckError, match=message) as error:
            self_check.require({"f32"}, ISAS[-1])
    others = ISAS[:-1]
    assert (f"MOESTRO_ISA={others[-1]}" if others else "another format") in str(error.value)
    assert "moestro doctor" in str(error.value)
    assert not list(tmp_path.iterdir())
    for isa in others:
        self_check.require({"f32"}, isa)


def test_what_passed_is_not_computed_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isa = native.isa()
    devices.get("cpu").check_formats(["int4-g32", "f32", "f32"])
    kept = json.loads((tmp_path / "self-check.json").read_text())
    assert kept["passed"] == {isa: ["f32", "int4-g32"]}
    checked: list[str] = []
    monkeypatch.setattr(self_check, "first_difference", lambda name, isa: checked.append(name))
    devices.get("cpu").check_formats(["int4-g32", "f32"])
    monkeypatch.setattr(self_check, "_passed", set())  # as in another process
    devices.get("cpu").check_formats(["f32", "int4-g32", "bf16"])
    assert checked == ["bf16"]
    assert [path.name for path in tmp_path.iterdir()] == ["self-check.json"]
    monkeypatch.setattr(self_check, "_passed", set())
    monkeypatch.setattr(self_check_cache, "_key", lambda: "another CPU or build")
    devices.get("cpu").check_formats(["f32"])
    assert checked == ["bf16", "f32"]


@pytest.mark.parametrize(
    "damaged",
    [
        b"", b"\xff\x00", b"[]", b"null", b"{", b"[" * 100_000, b'{"key": 1}',
        b'{"key": KEY, "passed": 3}', b'{"key": KEY, "passed": {"ISA": 3}}',
        b'{"key": KEY, "passed": {"ISA": [3, null, ["f32"]]}}',
    ],
)  # fmt: skip
def test_a_damaged_cache_is_ignored_and_replaced(
    damaged: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key, isa = json.dumps(self_check_cache._key()), native.isa()
    content = damaged.replace(b"KEY", key.encode()).replace(b"ISA", isa.encode())
    path = tmp_path / "self-check.json"
    path.write_bytes(content)
    checked: list[str] = []
    monkeypatch.setattr(self_check, "first_difference", lambda name, isa: checked.append(name))
    self_check.require(["f32"])
    assert checked == ["f32"]
    assert json.loads(path.read_text())["passed"] == {isa: ["f32"]}


def test_a_cache_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOESTRO_CACHE", str(tmp_path / "file" / "below"))
    self_check.require(["f32"])


def test_the_active_table_and_the_team_are_left_alone() -> None:
    before = native.isa(), native.threads()
    self_check.table(["int8-g32"])
    assert (native.isa(), native.threads()) == before
    with pytest.raises(UnsupportedOp, match="unknown instruction set abacus"):
        self_check.first_difference("f32", "abacus")


def test_the_reference_device_has_nothing_to_check() -> None:
    devices.get("reference").check_formats(["f32"])

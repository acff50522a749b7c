"""Measured beside predicted: a gap is explained by what the run met, and by nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import tiny_checkpoint

from moestro import LLM, SamplingParams
from moestro.engine import beside as module
from moestro.engine.beside import Beside, Conditions, Speeds, Watch, reasons
from moestro.machine import measured
from moestro.machine.measured import Measured
from moestro.machine.rates import CpuRates, Rate

QUIET = Conditions(seconds=2.0, core_share=0.99, major_faults=0)
SLOW, FAST = Speeds(measured=6.0, predicted=10.0), Speeds(measured=14.0, predicted=10.0)


def test_slower_memory_explains_a_slower_run_and_only_that() -> None:
    (text,) = reasons(SLOW, QUIET, then=60e9, now=37e9)
    assert "37 GB/s now" in text and "60 GB/s when measured" in text
    assert reasons(FAST, QUIET, then=60e9, now=37e9) == []
    assert "60 GB/s now" in reasons(FAST, QUIET, then=37e9, now=60e9)[0]


def test_other_programs_and_page_faults_explain_slower_runs() -> None:
    busy = Conditions(seconds=2.0, core_share=0.6, major_faults=500)
    found = reasons(SLOW, busy, then=60e9, now=60e9)
    assert any("40%" in text and "other programs" in text for text in found)
    assert any("500 pages" in text for text in found)
    assert reasons(FAST, busy, then=60e9, now=60e9) == []


def test_a_watch_sees_whether_the_cores_were_ours() -> None:
    watch = Watch(threads=1)
    time.sleep(0.05)
    assert watch.stop().core_share < 0.5
    watch, start = Watch(threads=1), time.process_time()
    while time.process_time() - start < 0.05:
        os.getpid()
    conditions = watch.stop()
    assert 0 < conditions.core_share <= 1.1 and conditions.seconds > 0


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setenv("MOESTRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module.measure, "read_now", lambda: 5e9)
    model = tiny_checkpoint.write(tmp_path / "model", family="mixtral")
    return LLM(model, threads=1, context=64)


def known(llm: LLM, *, threads: int = 1, read: float = 1e9) -> None:
    cpu = CpuRates(
        threads=threads, isa=llm.loaded.isa, read=Rate.exactly(read), dot=1e11, pairs=1e11
    )
    measured.keep(Measured(cpu=cpu))


def test_predictions_need_a_machine_measured_with_the_same_threads(
    llm: LLM, tmp_path: Path
) -> None:
    with llm:
        assert Beside.of(llm.loaded, chunk=64, path=tmp_path) is None
        known(llm, threads=7)
        assert Beside.of(llm.loaded, chunk=64, path=tmp_path) is None
        known(llm)
        found = Beside.of(llm.loaded, chunk=64, path=tmp_path)
        assert found is not None
        slower = found.decode(8, 8)
        known(llm, read=2e9)
        again = Beside.of(llm.loaded, chunk=64, path=tmp_path)
        assert again is not None and again.decode(8, 8) > slower > 0
        assert again.prefill(16) > 0


def test_a_line_has_both_speeds_and_the_reason_of_a_gap(llm: LLM, tmp_path: Path) -> None:
    with llm:
        known(llm)
        found = Beside.of(llm.loaded, chunk=64, path=tmp_path)
        assert found is not None
        completion = llm.generate(
            [1, 2, 3, 4], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        )[0]
        text = found.line(completion, QUIET)
        assert text.startswith("predicted ") and "prefill" in text and "decode" in text
        assert found.explain([Speeds(measured=1.2, predicted=1.0)], QUIET) == ""
        fast = found.explain([Speeds(measured=3.0, predicted=1.0)], QUIET)
        assert fast.startswith("200% faster: memory reads 5 GB/s now")
        slow = found.explain([Speeds(measured=0.2, predicted=1.0)], QUIET)
        assert slow == f"80% slower: {module._UNKNOWN}"

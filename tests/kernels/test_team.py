"""The thread team through the bindings: errors, thread counts, programs, fork, idleness."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref

import pytest
import torch
from packed_cases import rows_of

from moestro import native
from moestro.core.errors import InvalidRequest, UnsupportedOp
from moestro.devices.cpu.ops import CpuOps

OPS = CpuOps()


def works() -> bool:
    """One op over enough rows to give every worker some."""
    # Not torch.randn: its generator holds a mutex that a fork in another thread leaves locked.
    x = torch.arange(200.0 * 64).view(200, 64)
    index = torch.arange(200).flip(0).int()
    out = torch.zeros_like(x)
    OPS.gather_rows(x, index, out, rows_of(200))
    return torch.equal(out, x.flip(0))


@pytest.mark.parametrize("threads", range(1, 9))
def test_errors_in_workers_reach_the_caller_and_leave_the_team_whole(threads: int):
    native.set_threads(threads)
    logits = torch.zeros(100, 8)
    logits[70] = torch.nan
    ids, weights = torch.zeros(100, 2, dtype=torch.int32), torch.zeros(100, 2)
    for _ in range(20):
        # In one task of one worker, and in all workers at once.
        with pytest.raises(InvalidRequest, match="logits of row 70"):
            OPS.route(logits, ids, weights, rows_of(100), normalize=True)
        with pytest.raises(InvalidRequest, match="row count 101"):
            OPS.route(logits, ids, weights, rows_of(101), normalize=True)
        assert works()


def test_an_error_stops_the_program_and_the_next_replay_runs_whole():
    native.set_threads(3)
    logits, index, rows = torch.zeros(4, 8), torch.zeros(4).int(), rows_of(4)
    ids, weights = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, 2)
    out = torch.zeros(4, 2)
    with OPS.record() as program:
        OPS.route(logits, ids, weights, rows, normalize=True)
        OPS.gather_rows(weights, index, out, rows)
    logits[1] = torch.nan
    with pytest.raises(InvalidRequest, match="logits of row 1"):
        program.replay()
    assert not out.any()
    logits.zero_()
    program.replay()
    assert (out == 0.5).all()


def test_the_thread_count_changes_between_runs():
    for threads in (1, 4, 2, 8, 1, 3):
        native.set_threads(threads)
        assert native.threads() == threads
        assert works()
    for bad in (0, -1, 1025):
        with pytest.raises(InvalidRequest, match=f"between 1 and 1024, got {bad}"):
            native.set_threads(bad)
    assert native.threads() == 3


def test_a_program_reads_its_buffers_when_it_is_replayed():
    x, out = torch.zeros(3, 40), torch.full((3, 40), 9.0)
    rows = rows_of(0)
    with OPS.record() as program:
        OPS.silu_mul(x, x, out, rows)
        OPS.sigmoid(out, rows)
    assert len(program) == 2
    assert (out == 9).all()
    for n in range(1, 4):
        rows.fill_(n)
        x.fill_(float(n))
        program.replay()
        expected = torch.sigmoid(torch.nn.functional.silu(x[:n]) * x[:n])
        torch.testing.assert_close(out[:n], expected)
        assert (out[n:] == 9).all()


def test_recordings_do_not_nest_and_are_of_one_thread():
    seen = []
    with OPS.record() as program:
        with pytest.raises(UnsupportedOp, match="already recording"), OPS.record():
            pass
        other = threading.Thread(target=lambda: seen.append(works()))
        other.start()
        other.join()
    assert seen == [True]
    assert len(program) == 0
    with pytest.raises(InvalidRequest), OPS.record():
        OPS.silu_mul(torch.zeros(1, 2), torch.zeros(1, 3), torch.zeros(1, 2), rows_of(1))
    assert works()


def test_a_program_keeps_its_buffers_alive():
    x = torch.zeros(2, 8)
    alive = weakref.ref(x.untyped_storage())
    with OPS.record() as program:
        OPS.sigmoid(x, rows_of(2))
    seen = x.numpy()
    del x
    gc.collect()
    program.replay()
    assert (seen == 0.5).all()
    del program, seen
    gc.collect()
    assert alive() is None


def test_replay_from_several_python_threads():
    native.set_threads(2)
    failures: list[str] = []

    def work(seed: int) -> None:
        x = torch.randn(64, 96, generator=torch.Generator().manual_seed(seed))
        index, rows = torch.arange(64).flip(0).int(), rows_of(64)
        middle, out = torch.empty_like(x), torch.empty_like(x)
        with OPS.record() as program:
            OPS.gather_rows(x, index, middle, rows)
            OPS.gather_rows(middle, index, out, rows)
        for round_ in range(200):
            out.zero_()
            program.replay()
            if not torch.equal(out, x):
                failures.append(f"thread {seed}, round {round_}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for count in (1, 3, 2):  # the team is replaced meanwhile
        native.set_threads(count)
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert not failures


def fork_and_check() -> int:
    """Exit status of a child that computes; a child stuck for 20 s counts as failed."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            os._exit(0 if works() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes():
    native.set_threads(3)
    assert works()
    assert fork_and_check() == 0
    assert works()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_while_another_thread_computes():
    native.set_threads(2)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            works()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        assert [fork_and_check() for _ in range(10)] == [0] * 10
    finally:
        stop.set()
        worker.join()


def test_an_idle_team_uses_no_cpu():
    native.set_threads(4)
    assert works()
    time.sleep(1.0)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.025
    assert works()

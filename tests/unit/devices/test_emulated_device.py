"""The emulated accelerator: what runs when, what memory it has, and what goes wrong."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
from torch import Tensor

from moestro import _core as core
from moestro import devices
from moestro.core.errors import InvalidRequest, OutOfBudget, UnsupportedOp
from moestro.devices.base import Accelerator
from moestro.devices.cpu.ops import CpuOps
from moestro.devices.emulated import EmulatedDevice
from moestro.devices.emulated.memory import EmulatedMemory
from moestro.devices.emulated.ops import EmulatedOps
from moestro.ops.dispatch import OP_NAMES

ONE = torch.ones(1, dtype=torch.int32)


def copy_program(x: Tensor, out: Tensor) -> tuple[object, object]:
    """A step of a stream that copies a row, and what it must not outlive."""
    ops, steps = core.Program(), core.StreamProgram()
    core.copy_rows(ops, x, out, ONE)
    steps.add_ops(ops)
    return steps, ops


def row(value: float) -> Tensor:
    return torch.full((1, 4), float(value))


def test_it_is_an_accelerator_with_every_op():
    device = devices.get("emulated")
    assert device.name == "emulated"
    assert isinstance(device, Accelerator)
    assert not isinstance(devices.get("cpu"), Accelerator)
    assert {name for name in OP_NAMES if hasattr(EmulatedOps, name)} == OP_NAMES
    assert device.isa == devices.get("cpu").isa
    with pytest.raises(AttributeError, match="no attribute 'ropes'"):
        _ = device.ops.ropes


def test_ops_at_once_are_done_when_they_return():
    ops = EmulatedOps(max_delay_us=300)
    out = row(0)
    ops.copy_rows(row(3), out, ONE)
    assert torch.equal(out, row(3))


def test_steps_of_a_stream_run_later_and_in_order():
    first, second, third = row(1), row(0), row(0)
    stream = core.Stream(1, 3000)
    steps = [copy_program(first, second), copy_program(second, third)]
    lengths = []
    for value in range(5):
        stream.synchronize()
        first.fill_(value)
        for program, _ in steps:
            stream.launch(program)
        lengths.append(int(third[0, 0]))
        stream.synchronize()
        assert torch.equal(third, row(value))
    assert lengths != list(range(5)), "launching does not wait"


def test_other_streams_wait_for_events_alone():
    source, middle, out = row(1), row(0), row(0)
    slow, fast = core.Stream(5, 4000), core.Stream()
    write, read = copy_program(source, middle), copy_program(middle, out)
    event = core.Event()
    for value in range(2, 8):
        source.fill_(value)
        slow.launch(write[0])
        slow.record(event)
        fast.wait(event)
        fast.launch(read[0])
        fast.synchronize()
        assert torch.equal(out, row(value))
    fast.wait(core.Event())
    fast.synchronize()  # nothing was recorded, so there is nothing to wait for


def test_a_recorded_step_runs_ops_and_the_cpu_beside_them():
    ops = EmulatedOps(seed=3, max_delay_us=200, poison=True)
    x, there, back, out = row(1), row(0), row(0), row(0)
    with ops.host.record() as host:
        ops.host.copy_rows(there, back, ONE)
    work = ops.host_work(host, reads=[there], writes=[back])
    with ops.record() as program:
        ops.copy_rows(x, there, ONE)
        ops.submit(work)
        ops.copy_rows(row(5), out, ONE)
        ops.wait(work)
        ops.copy_rows(back, out, ONE)
    del work, host
    gc.collect()
    for value in range(6):
        x.fill_(value)
        program.replay()
        assert torch.equal(out, row(value))
        assert there.isnan().all(), "nobody may use it any more"


def test_what_a_work_writes_is_nonsense_before_it_is_done():
    ops = EmulatedOps(poison=True)
    there, back, out = row(2), row(7), row(0)
    host = CpuOps()
    with host.record() as nothing:
        pass
    work = ops.host_work(nothing, reads=[there], writes=[back])
    with ops.record() as program:
        ops.submit(work)
        ops.copy_rows(back, out, ONE)
        ops.wait(work)
    program.replay()
    assert out.isnan().all()


def test_the_cpu_works_beside_the_stream():
    """The stream goes on at once after it has submitted work that begins late."""
    lane, stream = core.HostLane(0, 0), core.Stream()
    slow = core.HostLane(2, 60_000)
    x, out, early = row(4), row(0), row(0)
    ops, look = core.Program(), core.Program()
    core.copy_rows(ops, x, out, ONE)
    core.copy_rows(look, out, early, ONE)
    for chosen in (slow, lane):
        work = core.HostWork(chosen, ops)
        steps = core.StreamProgram()
        steps.add_callback(work.submit, work.user)
        steps.add_ops(look)
        steps.add_callback(work.wait, work.user)
        looked = []
        for _ in range(5):
            out.zero_()
            stream.launch(steps)
            stream.synchronize()
            assert torch.equal(out, x), "it was waited for"
            looked.append(float(early[0, 0]))
        if chosen is slow:
            assert 0 in looked
        chosen.check()


def test_errors_of_either_side_reach_the_caller_once_and_leave_nothing_behind():
    ops = EmulatedOps(max_delay_us=100)
    x, there, out, rows = row(1), row(0), row(0), ONE.clone()
    host_rows = ONE.clone()
    with ops.host.record() as host:
        ops.host.copy_rows(x, there, host_rows)
    work = ops.host_work(host, reads=[x], writes=[there])
    with ops.record() as program:
        ops.submit(work)
        ops.copy_rows(x, out, rows)
        ops.wait(work)
        ops.copy_rows(there, out, ONE)
    for broken in (rows, host_rows):
        broken.fill_(2)
        with pytest.raises(InvalidRequest, match="row count 2"):
            program.replay()
        broken.fill_(1)
        out.zero_()
        program.replay()
        assert torch.equal(out, x)


def test_steps_after_a_failed_one_are_left_out():
    ops = EmulatedOps()
    out = row(0)
    with ops.record() as program:
        ops.copy_rows(row(1), row(0), torch.full((1,), 9, dtype=torch.int32))
        ops.copy_rows(row(8), out, ONE)
    with pytest.raises(InvalidRequest, match="row count 9"):
        program.replay()
    assert torch.equal(out, row(0))


def test_recordings_do_not_nest():
    ops = EmulatedOps()
    refused = pytest.raises(UnsupportedOp, match="emulated is already recording")
    with ops.record(), refused, ops.record():
        pass


def test_an_idle_stream_uses_no_cpu():
    ops = EmulatedOps()
    ops.copy_rows(row(1), row(0), ONE)
    before, started = time.process_time(), threading.active_count()
    time.sleep(0.1)
    assert time.process_time() - before < 0.05
    assert threading.active_count() == started


def test_memory_is_counted_by_what_it_is_for_until_it_is_gone():
    memory = EmulatedMemory(budget=10 << 10)
    kept = memory.allocate("experts", 6 << 10)
    assert kept.numel() == 6 << 10 and not kept.any()
    owner = row(0)
    memory.reserve("KV cache", 2 << 10, owner)
    assert memory.held == {"experts": 6 << 10, "KV cache": 2 << 10}
    with pytest.raises(OutOfBudget, match=r"dense weights take 3 KiB .* only 2 KiB are left"):
        memory.allocate("dense weights", 3 << 10)
    with pytest.raises(OutOfBudget, match="experts 6 KiB, KV cache 2 KiB"):
        memory.reserve("dense weights", 3 << 10, owner)
    part = kept[10:20]
    del kept
    gc.collect()
    assert memory.held["experts"] == 6 << 10, "a view of it is still there"
    del part, owner
    gc.collect()
    assert memory.held == {}
    memory.set_budget(None)
    assert memory.allocate("experts", 20 << 10).numel() == 20 << 10


def test_devices_made_apart_share_nothing():
    one, other = EmulatedDevice(), EmulatedDevice()
    assert one.memory is not other.memory and one.ops is not other.ops

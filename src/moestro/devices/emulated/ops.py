"""The emulated accelerator's ops: the cpu device's kernels as steps of a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from moestro import _core as core
from moestro.devices.cpu.ops import CpuOps, CpuProgram
from moestro.ops.contracts import Ops, Program
from moestro.ops.dispatch import OP_NAMES


class HostWork:
    """A recorded program of the CPU that a stream begins and waits for."""

    def __init__(
        self, lane: Any, program: CpuProgram, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        self.program = program
        self.native = core.HostWork(lane, program.native)
        self.reads, self.writes = reads, writes


class EmulatedProgram(CpuProgram):
    """A recorded step: runs of ops, and functions of the host between them."""

    def __init__(self, stream: Any, lane: Any) -> None:
        super().__init__()
        self._stream, self._lane = stream, lane
        self._steps = core.StreamProgram()
        self._ops: Any = None

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def native(self) -> Any:
        """The run of ops that is being recorded."""
        if self._ops is None:
            self._ops = core.Program()
            self._steps.add_ops(self._ops)
        return self._ops

    def add_callback(self, function: int, work: HostWork, *, always: bool = False) -> None:
        """Call a function with the work, by address, when all before is done. always: also when
        that has failed.
        """
        self.keep(work)
        self._ops = None
        self._steps.add_callback(function, work.native.user, always=always)

    def launch(self) -> None:
        """Give the step to the stream. The program must live until it is done."""
        self._stream.launch(self._steps)

    def replay(self) -> None:
        """Run the step, without the GIL and without Python, until it is done."""
        self.launch()
        self._stream.synchronize()
        self._lane.check()


class EmulatedOps(CpuOps):
    """``ops.accelerator.AcceleratorOps`` on one stream.

    Ops outside of a recording are given to the stream too, and waited for. Up to
    max_delay_us microseconds pass before each op, and max_host_delay_us before each work of the
    CPU, by random sequences of ``seed``. With poison, what a work writes is nonsense from when it
    is submitted until it is done, and what it reads from when it was waited for on: whoever uses a
    buffer at the wrong time gets NaN or an error.
    """

    device = "emulated"

    def __init__(
        self,
        *,
        seed: int = 0,
        max_delay_us: int = 0,
        max_host_delay_us: int = 0,
        poison: bool = False,
    ) -> None:
        super().__init__()
        self.stream = core.Stream(seed, max_delay_us)
        self._lane = core.HostLane(seed + 1, max_host_delay_us)
        self._host = CpuOps()
        self._poison = poison

    @property
    def host(self) -> Ops:
        return self._host

    def pinned(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like)

    def host_work(
        self, program: Program, *, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> HostWork:
        assert isinstance(program, CpuProgram)
        return HostWork(self._lane, program, reads, writes)

    def submit(self, work: HostWork) -> None:
        if self._poison:
            self._spoil(work.writes)
        self._step(lambda program: program.add_callback(work.native.submit, work))

    def wait(self, work: HostWork) -> None:
        self._step(lambda program: program.add_callback(work.native.wait, work, always=True))
        if self._poison:
            self._spoil(work.reads)

    def _spoil(self, buffers: Sequence[Tensor]) -> None:
        for buffer in buffers:
            nonsense = torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).max
            rows = buffer.flatten(1)
            count = torch.tensor([rows.shape[0]], dtype=torch.int32)
            self.copy_rows(torch.full_like(rows, nonsense), rows, count)

    def _new_program(self) -> EmulatedProgram:
        return EmulatedProgram(self.stream, self._lane)

    def _step(self, add: Callable[[EmulatedProgram], None]) -> None:
        program = self._recording.program
        if isinstance(program, EmulatedProgram):
            add(program)
            return
        with self.record() as alone:
            assert isinstance(alone, EmulatedProgram)
            add(alone)
        alone.replay()


def _on_stream(name: str) -> Callable[..., None]:
    issue = getattr(CpuOps, name)

    @wraps(issue)
    def call(self: EmulatedOps, *args: Any, **options: Any) -> None:
        self._step(lambda _: issue(self, *args, **options))

    return call


for _name in OP_NAMES & frozenset(dir(CpuOps)):
    setattr(EmulatedOps, _name, _on_stream(_name))

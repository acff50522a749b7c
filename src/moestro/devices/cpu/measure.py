"""How fast this CPU is: memory and arithmetic by the native probes, kernels by small products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moestro import _core as core
from moestro import formats, native
from moestro.core import env
from moestro.core.errors import UnsupportedFormat
from moestro.formats.base import Format, packed_buffer
from moestro.machine import facts
from moestro.machine.placement import Placement, place
from moestro.machine.rates import READ_SHARE, CpuRates, KernelRate, Rate

#: memory that is read for one sample, well beyond any cache
_READ_NBYTES = 1 << 28
# Memory is measured in between everything else, as it may change from one second to the next.
_SAMPLES = 7
# Products that stay in the caches, so that they show arithmetic and not memory, and take much
# longer than the barrier at their end: output channels per thread, input channels, many tokens.
_ROWS, _COLS, _MANY = 512, 2048, 64
_PACKED_ROWS = 64  # these are packed, and repeated
_KERNEL_SECONDS = 0.03


def measure(
    format_names: Collection[str] | None = None,
    *,
    step: Callable[[str], None] | None = None,
) -> CpuRates:
    """Measure with the team that runs get (and leave it set). format_names: whose kernels (default:
    of all formats). ``step`` hears what is being measured. Takes some seconds.
    """
    say = step or (lambda text: None)
    chosen = sorted(formats.names() if format_names is None else format_names)
    say("memory, one thread")
    machine = facts.gather()
    placed = place(
        machine,
        threads=env.threads(),
        pin=env.pin() or "auto",
        numa_nodes=env.numa_nodes(),
    )
    read_one, read_nodes = _parts_of_the_team(placed)
    native.set_team(placed.nodes, placed.cpus, placed.node_numbers)
    say("arithmetic")
    # Others' work can only make a peak look lower.
    dot, pairs, fma = (
        max(probe() for _ in range(3))
        for probe in (native.probe_dot, native.probe_bf16, native.probe_fma)
    )
    read = [native.probe_read(_READ_NBYTES)]
    kernels: dict[str, _Kernel] = {}
    memory = None if read_nodes else packed_buffer(_READ_NBYTES)
    every = max(1, len(chosen) // _SAMPLES)
    for index, name in enumerate(chosen):
        say(f"kernels of {name}")
        kernel = _measure_kernel(formats.get(name), memory)
        if kernel is not None:
            kernels[name] = kernel
        if index % every == 0:
            read.append(native.probe_read(_READ_NBYTES))
    say("memory, all threads")
    while len(read) < _SAMPLES:
        read.append(native.probe_read(_READ_NBYTES))
    rate = _all_nodes(read_nodes) if read_nodes else Rate.of(read)
    return CpuRates(
        threads=native.threads(),
        isa=native.isa(),
        read=rate,
        read_one=read_one,
        read_nodes=read_nodes,
        copy=_copy(),
        dot=dot,
        pairs=pairs,
        fma=fma,
        kernels={
            name: KernelRate(
                one=kernel.one,
                more=kernel.more,
                from_memory=kernel.read / rate.median if kernel.read else READ_SHARE,
            )
            for name, kernel in kernels.items()
        },
    )


def read_now() -> float:
    """Bytes per second that all threads read from memory at this moment; a tenth of a second."""
    return native.probe_read(_READ_NBYTES)


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    """one, more: as of KernelRate. read: bytes per second from memory, 0 where not measured."""

    one: float
    more: float
    read: float


def _measure_kernel(fmt: Format, memory: torch.Tensor | None) -> _Kernel | None:
    """None if this build has no kernel for the format. memory: to hold copies of a matrix, which no
    cache holds; None where memory is of several nodes, and weights lie where they are read.
    """
    rows = _ROWS * native.threads()
    # Blocks of output channels lie one after the other in every format.
    data = fmt.example(_PACKED_ROWS, _COLS).repeat(rows // _PACKED_ROWS)
    seconds = {}
    for tokens in (1, _MANY):
        try:
            seconds[tokens] = min(_seconds(_program(fmt, [data], rows, tokens)))
        except UnsupportedFormat:
            return None
    operations = 2.0 * rows * _COLS
    more = max(seconds[_MANY] - seconds[1], seconds[_MANY] / _MANY) / (_MANY - 1)
    read = 0.0
    if memory is not None:
        count = memory.numel() // data.numel()
        copies = list(memory[: count * data.numel()].view(count, -1).copy_(data).unbind())
        taken = _seconds(_program(fmt, copies, rows, 1))
        read = count * data.numel() / statistics.median(taken)
    return _Kernel(one=operations / seconds[1], more=operations / more, read=read)


def _program(fmt: Format, matrices: list[torch.Tensor], channels: int, tokens: int) -> Any:
    """Multiplies tokens with each of the matrices in turn."""
    x, out = torch.randn(tokens, _COLS), torch.empty(tokens, channels)
    rows = torch.tensor([tokens], dtype=torch.int32)
    program = native.Program()
    for data in matrices:
        core.linear(program, x, fmt.name, data, channels, _COLS, out, rows)
    return program


def _seconds(program: Any) -> list[float]:
    """Of each replay. Of short ones the least counts: others are longer by what else the cores had
    to do.
    """
    program.replay()
    taken: list[float] = []
    end = time.perf_counter() + _KERNEL_SECONDS
    while not taken or time.perf_counter() < end:
        start = time.perf_counter()
        program.replay()
        taken.append(time.perf_counter() - start)
    return taken


def _all_nodes(rates: Sequence[Rate]) -> Rate:
    """Each node's threads read its memory at the same time."""
    return Rate(
        median=sum(rate.median for rate in rates),
        least=sum(rate.least for rate in rates),
        greatest=sum(rate.greatest for rate in rates),
    )


def _parts_of_the_team(placed: Placement) -> tuple[Rate, tuple[Rate, ...]]:
    """What one thread reads, and where there are several nodes, what the threads of each read of
    their own memory. Changes the team.
    """
    native.set_team([0], [placed.cpus[0]], placed.node_numbers[:1])
    one = Rate.of([native.probe_read(_READ_NBYTES // 2) for _ in range(3)])
    nodes = sorted(set(placed.nodes))
    if len(nodes) < 2:
        return one, ()
    rates = []
    for node in nodes:
        own = [cpus for cpus, found in zip(placed.cpus, placed.nodes, strict=True) if found == node]
        native.set_team([0] * len(own), own, placed.node_numbers[node : node + 1])
        # Another size is other memory, which the first thread touches on its node.
        size = _READ_NBYTES + (1 + node << 21)
        rates.append(Rate.of([native.probe_read(size) for _ in range(3)]))
    return one, tuple(rates)


def _copy() -> Rate:
    """Bytes copied per second by one thread from memory to memory."""
    source, target = (torch.ones(_READ_NBYTES // 2, dtype=torch.uint8) for _ in range(2))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    samples = []
    for _ in range(3):
        start = time.perf_counter()
        target.copy_(source)
        samples.append(target.numel() / (time.perf_counter() - start))
    torch.set_num_threads(threads)
    return Rate.of(samples)

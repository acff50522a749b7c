"""What the commands share on screen: consoles, the byte progress bar, sizes and rates."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from moestro.core.units import format_bytes

if TYPE_CHECKING:
    from moestro.engine.request import Completion

Progress = Callable[[int, int], None]


@contextmanager
def byte_progress(text: str, *, lines_every: float | None = None) -> Iterator[Progress | None]:
    """A bar on stderr with bytes/s and time left. Where stderr is no terminal a line with the same
    every so many seconds, or None.
    """
    if not sys.stderr.isatty():
        yield None if lines_every is None else progress_lines(text, lines_every)
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(binary_units=True),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None)

        begun = False

        def update(done: int, total: int) -> None:
            nonlocal begun
            if begun:
                bar.update(task, completed=done, total=total)
            else:  # what is done already is not part of the rate
                bar.reset(task, completed=done, total=total)
            begun = True

        yield update


def progress_lines(text: str, seconds: float) -> Progress:
    """``converting: 1.5 of 12 GiB, 310 MiB/s, 35 s left``, not more often than every so many
    seconds.
    """
    first: tuple[float, int] | None = None
    said = 0.0

    def update(done: int, total: int) -> None:
        nonlocal first, said
        now = time.monotonic()
        if first is None:
            first, said = (now, done), now
        if now - said < seconds:
            return
        said = now
        rate = (done - first[1]) / (now - first[0]) if now > first[0] else 0.0
        left = f", {duration((total - done) / rate)} left" if rate > 0 else ""
        note(f"{text}: {format_bytes(done)} of {format_bytes(total)}, {format_bytes(rate)}/s{left}")

    return update


def duration(seconds: float) -> str:
    """``35 s``, ``12 min``, ``3.4 h``"""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def note(text: str) -> None:
    """A line on stderr, for the person and not for the pipe."""
    print(text, file=sys.stderr, flush=True)


def write(text: str) -> None:
    """A piece of an answer on stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def stats_line(completion: Completion) -> str:
    """``31 prompt tokens (12 reused, 250.1 tok/s) · 64 answer tokens (12.3 tok/s) · length``"""
    usage, timings = completion.usage, completion.timings
    computed = usage.prompt_tokens - usage.cached_tokens
    prefill = _rate(computed, timings.prefill)
    reused = f"{usage.cached_tokens} reused, " if usage.cached_tokens else ""
    decode = _rate(usage.completion_tokens - 1, timings.decode)
    return (
        f"{usage.prompt_tokens} prompt tokens ({reused}{prefill}) · "
        f"{usage.completion_tokens} answer tokens ({decode}) · {completion.finish_reason}"
    )


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f} tok/s" if tokens > 0 and seconds > 0 else "-"

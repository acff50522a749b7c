"""What the commands share on screen: consoles, the byte progress bar, sizes and rates."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moestro.engine.request import Completion

Progress = Callable[[int, int], None]


@contextmanager
def byte_progress(text: str) -> Iterator[Progress | None]:
    """A bar on stderr with bytes/s and time left. None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
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

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield update


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

"""The self-check on screen: a table of format by instruction set, or a list where too wide."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

#: instruction set -> format -> "ok", "not built", or what is wrong
Results = dict[str, dict[str, str]]
OK = "ok"
NOT_BUILT = "not built"


def collect(built: list[str]) -> Results:
    """Every format on every instruction set that this CPU has; nothing for those it lacks."""
    from moestro import formats
    from moestro.devices.cpu import self_check

    found = self_check.table()
    results: Results = {isa: {} for isa in built}
    for isa, checked in found.items():
        for name in formats.names():
            if name not in checked:
                results[isa][name] = NOT_BUILT
            else:
                difference = checked[name]
                results[isa][name] = OK if difference is None else str(difference)
    return results


def failures(results: Results) -> list[tuple[str, str, str]]:
    """(instruction set, format, what is wrong) of everything that is."""
    return [
        (isa, name, text)
        for isa, row in results.items()
        for name, text in row.items()
        if text not in (OK, NOT_BUILT)
    ]


def render(results: Results, in_use: str, console: Console) -> list[RenderableType]:
    """What to print: the table if the terminal is wide enough for it, then each failure."""
    from rich.measure import Measurement
    from rich.text import Text

    table = _table(results, in_use)
    wide = Measurement.get(console, console.options.update(width=10_000), table).maximum
    body = [table] if wide <= console.width else [Text(line) for line in _by_isa(results, in_use)]
    wrong = [Text(f"{name} on {isa}: {text}") for isa, name, text in failures(results)]
    return [*body, *wrong]


def _table(results: Results, in_use: str) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("format", no_wrap=True)
    for isa in results:
        table.add_column(f"{isa}*" if isa == in_use else isa, no_wrap=True)
    for name, cells in _families(results):
        table.add_row(name, *cells)
    return table


def _families(results: Results) -> list[tuple[str, tuple[str, ...]]]:
    """Formats that differ only in their groups, and have the same results, as one row."""
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in next(row for row in results.values() if row):
        stem, _, group = name.partition("-")
        cells = tuple(_cell(row.get(name)) for row in results.values())
        rows.setdefault((stem, cells), []).append(group)
    listed = []
    for (stem, cells), groups in rows.items():
        ordered = sorted(groups, key=lambda g: (not g[1:].isdigit(), len(g), g))
        listed.append((" ".join([stem, *filter(None, ordered)]), cells))
    return listed


def _cell(result: str | None) -> str:
    if result is None:
        return "-"
    return result if result in (OK, NOT_BUILT) else "FAILED"


def _by_isa(results: Results, in_use: str) -> list[str]:
    lines = []
    for isa, row in results.items():
        used = " (in use)" if isa == in_use else ""
        good = sum(text == OK for text in row.values())
        built = sum(text != NOT_BUILT for text in row.values())
        said = f"{good} of {built} formats ok" if row else "not on this CPU"
        lines.append(f"{isa}{used}: {said}")
    return lines

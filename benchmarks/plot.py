"""Draw what ``compare.py --json`` measured, docs/images/compare-{operator,model}.png, and write the
tables of docs/BENCHMARKS.md from it.

    pip install -e '.[bench]'
    python benchmarks/plot.py [--results benchmarks/results] [--docs docs]

Pictures show the peer's time over ours: above one, Moestro is faster.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from comparing import tables
from comparing.tables import Content

ROOT = Path(__file__).resolve().parent.parent
_INK, _GRID = "#333333", "#dddddd"
_COLOURS = ["#0b6e99", "#d9730d", "#4d8b31", "#9b3fa0", "#c0392b", "#7f6f00"]
_MARKERS = "osD^vP"


def caption(content: Content) -> str:
    """What a figure depends on, in a line."""
    facts = content["facts"]
    threads = "1 thread" if facts["threads"] == 1 else f"{facts['threads']} threads"
    return f"{facts['cpu']}, {facts['isa']}, {threads}\nMoestro {facts['moestro']}, {facts['peer']}"


def dress(axes: Axes, highest: float, lowest: float) -> None:
    """Ratios on a logarithmic axis, with the line where both are equal."""
    axes.set_yscale("log")
    ticks = [
        t
        for t in (0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16)
        if t == 1 or lowest * 0.8 <= t <= highest * 1.3
    ]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.set_ylim(min(lowest, 1) * 0.85, max(highest, 1) ** 1.25 * 1.2)  # and room for a legend
    axes.axhline(1, color=_INK, linewidth=1)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def limits_of(rows: list[Content]) -> tuple[float, float]:
    return max(row["ratio_max"] for row in rows), min(row["ratio_min"] for row in rows)


def whisker(row: Content) -> list[list[float]]:
    return [[row["ratio"] - row["ratio_min"]], [row["ratio_max"] - row["ratio"]]]


def draw_operator(axes: Axes, content: Content) -> None:
    """A line per kind of weights over the number of tokens."""
    rows = content["rows"]
    tokens = sorted({row["tokens"] for row in rows})
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    for index, kind in enumerate(kinds):
        line = sorted((r for r in rows if r["kind"] == kind), key=lambda row: row["tokens"])
        places = [tokens.index(row["tokens"]) + (index - len(kinds) / 2) * 0.05 for row in line]
        colour = _COLOURS[index % len(_COLOURS)]
        axes.plot(
            places, [row["ratio"] for row in line], marker=_MARKERS[index % len(_MARKERS)],
            color=colour, label=f"{kind} ({line[0]['format']})", linewidth=1.6, markersize=5,
        )  # fmt: skip
        for place, row in zip(places, line, strict=True):
            axes.errorbar(place, row["ratio"], whisker(row), color=colour, linewidth=1, alpha=0.6)
    axes.set_xticks(range(len(tokens)), [str(n) for n in tokens])
    axes.set_xlabel("tokens per call")
    dress(axes, *limits_of(rows))
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper left")


def draw_model(axes: Axes, content: Content) -> None:
    """A group of bars per task, a bar per file type."""
    rows = content["rows"]
    tasks = sorted({row["task"] for row in rows}, key=task_order)
    types = list(dict.fromkeys(row["file_type"] for row in rows))
    width = 0.8 / max(4, len(types))
    for number, task in enumerate(tasks):
        group = [row for row in rows if row["task"] == task]
        for index, row in enumerate(group):
            place = number + (index - (len(group) - 1) / 2) * width
            axes.bar(
                place, row["ratio"] - 1, width * 0.92, bottom=1, yerr=whisker(row),
                color=_COLOURS[types.index(row["file_type"])],
                error_kw={"linewidth": 1, "ecolor": _INK},
                label=row["file_type"] if number == 0 else None,
            )  # fmt: skip
            axes.annotate(
                f"{row['ratio']:.2f}", (place, row["ratio_max"]), (0, 3), ha="center",
                textcoords="offset points", fontsize=8, color=_INK,
            )  # fmt: skip
    axes.set_xticks(range(len(tasks)), [task_name(task) for task in tasks])
    axes.set_xlim(-0.6, len(tasks) - 0.4)
    dress(axes, *limits_of(rows))
    axes.legend(fontsize=8, frameon=False, ncols=4, loc="upper left")


def task_order(task: str) -> tuple[bool, int]:
    kind, _, number = task.partition("-")
    return kind != "prefill", int(number)


def task_name(task: str) -> str:
    kind, _, number = task.partition("-")
    return f"prefill\n{number} tokens" if kind == "prefill" else f"decode at\n{number} tokens"


DRAWERS = {"operator": draw_operator, "model": draw_model}


def figure(part: str, contents: list[Content], path: Path) -> None:
    """One picture, a panel per peer."""
    pyplot.rcParams.update({"font.size": 9, "axes.edgecolor": _INK, "text.color": _INK})
    drawn, panels = pyplot.subplots(
        1, len(contents), figsize=(1.5 + 4.6 * len(contents), 4.4), squeeze=False
    )
    for axes, content in zip(panels[0], contents, strict=True):
        DRAWERS[part](axes, content)
        axes.set_title(f"against {content['peer']}", fontsize=10, loc="left", fontweight="bold")
        axes.annotate(
            caption(content), (0, -0.2), xycoords="axes fraction", fontsize=7, va="top",
            color="#777777",
        )  # fmt: skip
    panels[0][0].set_ylabel("peer's time / Moestro's time")
    shape = contents[0]["facts"]["shape"]
    drawn.suptitle(
        f"{tables.PARTS[part]}, shape of {shape}: above the line Moestro is faster", fontsize=11
    )
    drawn.tight_layout()
    drawn.savefig(path, dpi=130)
    pyplot.close(drawn)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    images = options.docs / "images"
    images.mkdir(parents=True, exist_ok=True)
    for part in tables.PARTS:
        contents = tables.load(options.results, part)
        if not contents:
            print(f"nothing of {part} in {options.results}", file=sys.stderr)
            continue
        path = images / f"compare-{part}.png"
        figure(part, contents, path)
        print(path)
    page = options.docs / "BENCHMARKS.md"
    tables.write(page, options.results, images)
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())

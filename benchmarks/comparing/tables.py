"""Results as Markdown tables, and the place for them in docs/BENCHMARKS.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Content = dict[str, Any]

BEGIN = "<!-- written by benchmarks/plot.py from benchmarks/results/{}-*.json -->"
END = "<!-- end of what benchmarks/plot.py writes -->"
PARTS = {"operator": "MoE operator", "model": "Whole model"}


def load(folder: Path, part: str) -> list[Content]:
    """The files of one part (``operator`` or ``model``) that have rows, by peer."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob(f"compare-{part}-*.json"))]
    kept = [content for content in found if content["rows"]]
    return sorted(
        kept, key=lambda content: (not content["peer"].startswith("llama"), content["peer"])
    )


def setting(content: Content) -> str:
    """What the figures depend on, in a line."""
    facts = content["facts"]
    threads = "1 thread" if facts["threads"] == 1 else f"{facts['threads']} threads"
    return (
        f"{facts['cpu']}, `{facts['isa']}`, {threads} each; shape of {facts['shape']}; "
        f"Moestro {facts['moestro']}, {facts['peer']}"
    )


def operator_table(content: Content) -> list[str]:
    """A row per kind of weights, a column per number of tokens."""
    rows = content["rows"]
    counts = sorted({row["tokens"] for row in rows})
    lines = [
        f"| weights | ours | {' | '.join(map(_tokens, counts))} | error: ours, peer |",
        "|---" * (len(counts) + 3) + "|",
    ]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        chosen = {row["tokens"]: row for row in rows if row["kind"] == kind}
        first = next(iter(chosen.values()))
        cells = [_cell(chosen[n]) if n in chosen else "" for n in counts]
        errors = f"{_error(first['ours_error'])}, {_error(first['peer_error'])}"
        lines.append(f"| {kind} | `{first['format']}` | {' | '.join(cells)} | {errors} |")
    return lines


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _cell(row: Content) -> str:
    share = max((row["ours_of_read"], "read"), (row["ours_of_peak"], row["peak"]))
    return f"**{row['ratio']:.2f}×** {_time(row['ours_us'])} ({share[0]:.0%} of {share[1]})"


def _time(microseconds: float) -> str:
    return f"{microseconds:.0f} µs" if microseconds < 10_000 else f"{microseconds / 1e3:.1f} ms"


def _error(errors: Content) -> str:
    value = errors["source"] if errors["decoded"] is None else errors["decoded"]
    return f"{value:.1e}"


def model_table(content: Content) -> list[str]:
    """A row per file type and task."""
    lines = [
        "| file | task | ours | peer | ratio | least, most | of read: ours, peer | differ by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in content["rows"]:
        shares = [row["ours_of_read"], row["peer_of_read"]]
        of_read = "" if None in shares else ", ".join(f"{share:.0%}" for share in shares)
        differ = f"{row['disagreement']:.1%}" if "disagreement" in row else ""
        spread = f"{row['ratio_min']:.2f} to {row['ratio_max']:.2f}"
        lines.append(
            f"| {row['file_type']} | {_task(row['task'])} | "
            f"{row['ours_us']:.0f} µs | {row['peer_us']:.0f} µs | **{row['ratio']:.2f}×** | "
            f"{spread} | {of_read} | {differ} |"
        )
    return lines


def _task(task: str) -> str:
    kind, _, number = task.partition("-")
    return f"{kind} {number}" if kind == "prefill" else f"{kind} at {number}"


def moe_lines(results: Path) -> list[str]:
    """A table per shape and number of threads: how near the MoE operator is to the limits."""
    lines = []
    for path in sorted(results.glob("moe-*.json"), reverse=True):
        content = json.loads(path.read_text())
        limits, formats = content["limits"], content["formats"]
        counts = [row["tokens"] for row in next(iter(formats.values()))]
        threads = "1 thread" if limits["threads"] == 1 else f"{limits['threads']} threads"
        lines += [
            f"Shape of {content['shape']}, {threads}, {limits['cpu']}, `{limits['isa']}`, Moestro "
            f"{content['moestro']}; read probe in GB/s: median {limits['read_gb_s']:.0f}, "
            f"{limits['read_gb_s_min']:.0f} to {limits['read_gb_s_max']:.0f}.",
            "",
            f"| weights | {' | '.join(map(_tokens, counts))} |",
            "|---" * (len(counts) + 1) + "|",
        ]
        lines += [
            f"| `{name}` | {' | '.join(map(_shares, rows))} |" for name, rows in formats.items()
        ]
        lines.append("")
    return lines


def _shares(row: Content) -> str:
    limit = "dot" if row["frac_of_bf16_peak"] is None else "bf16"
    of_read, of_peak = row["frac_of_read_bw"], row[f"frac_of_{limit}_peak"]
    read, peak = f"{of_read:.0%} of read", f"{of_peak:.0%} of {limit}"
    return f"**{read}**, {peak}" if of_read > of_peak else f"{read}, **{peak}**"


def write(page: Path, results: Path, images: Path) -> None:
    """Replace what is between the marks of ``page``. Raises ValueError without them."""
    text = _replaced(page, page.read_text(), "moe", moe_lines(results))
    lines = []
    tables = {"operator": operator_table, "model": model_table}
    for part, title in PARTS.items():
        contents = load(results, part)
        if not contents:
            continue
        image = images / f"compare-{part}.png"
        lines += [f"### {title}", ""]
        if image.exists():
            lines += [f"![{title}, ratios]({image.relative_to(page.parent)})", ""]
        for content in contents:
            lines += [f"Against {content['peer']}: {setting(content)}.", ""]
            lines += [*tables[part](content), ""]
    page.write_text(_replaced(page, text, "compare", lines))


def _replaced(page: Path, text: str, results: str, lines: list[str]) -> str:
    begin = BEGIN.format(results)
    if text.count(begin) != 1 or END not in text.split(begin)[1]:
        raise ValueError(f"{page} should have one line {begin!r} and after it {END!r}")
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n" + "\n".join(lines) + END + rest.split(END, 1)[1]

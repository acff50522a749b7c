"""What was measured, as a table and as JSON that several partial runs fill."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(kw_only=True)
class Report:
    """The rows of one peer and part (``operator`` or ``model``).

    facts: what a figure depends on: CPU, kernels, threads, shape, versions. keys: the fields that
    name a row.
    """

    peer: str
    part: str
    keys: tuple[str, ...]
    facts: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def path(self, folder: Path) -> Path:
        return folder / f"compare-{self.part}-{self.peer}-t{self.facts['threads']}.json"

    def save(self, folder: Path, limits: dict[str, Any]) -> str:
        """Write the rows, each with the limits of its own run, and keep the file's other rows if
        they were measured under the same facts. Returns a sentence about what happened.
        """
        path, kept = self.path(folder), []
        rows = [row | {"limits": limits} for row in self.rows]
        if path.exists():
            old = json.loads(path.read_text())
            if old["facts"] == self.facts:
                new = {self._key(row) for row in rows}
                kept = [row for row in old["rows"] if self._key(row) not in new]
        folder.mkdir(parents=True, exist_ok=True)
        content = {"peer": self.peer, "part": self.part, "facts": self.facts, "rows": kept + rows}
        path.write_text(json.dumps(content, indent=1) + "\n")
        return f"{len(rows)} rows written, {len(kept)} kept: {path}"

    def _key(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[key] for key in self.keys)

    def add(self, row: Any, **more: Any) -> dict[str, Any]:
        """Add a row (a dataclass) and return it as it will be written."""
        self.rows.append(asdict(row) | more)
        return self.rows[-1]


def line(row: dict[str, Any], name: str) -> str:
    """A row of the summary: both times, the ratio with its spread, fractions of the limits."""
    text = (
        f"{name:24s} ours {row['ours_us']:9.0f}  peer {row['peer_us']:9.0f} us  "
        f"{row['ratio']:5.2f}x ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
    )
    for limit in ("read", "peak"):
        if row.get(f"ours_of_{limit}") is not None:
            text += f"  of {limit} {row[f'ours_of_{limit}']:4.0%} / {row[f'peer_of_{limit}']:4.0%}"
    return text

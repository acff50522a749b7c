"""What was measured of this machine, for ``doctor``: taking it and showing it."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moestro.core.units import format_bytes, format_rate

if TYPE_CHECKING:
    from moestro.machine.measured import Measured

#: memory is said to change from moment to moment where the most is so much more than the least
_UNSTEADY = 1.25


def collect(path: Path, *, anew: bool) -> dict[str, Any]:
    """What is known of this machine and the disk of ``path``, as plain data; measured now if asked.

    Raises InvalidRequest for a disk that cannot be measured.
    """
    from moestro.machine import measured

    found = _measure(path) if anew else measured.load()
    disk = found.disk(path)
    return {
        "when": found.when,
        "cpu": None if found.cpu is None else dataclasses.asdict(found.cpu),
        "accelerator": (
            None if found.accelerator is None else dataclasses.asdict(found.accelerator)
        ),
        "disk": None if disk is None else dataclasses.asdict(disk) | {"path": str(path)},
    }


def _measure(path: Path) -> Measured:
    from moestro.devices.cpu.measure import measure
    from moestro.machine import measured
    from moestro.machine.accelerator import measure_accelerator
    from moestro.machine.disk import measure_disk

    def step(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[Kmeasuring {text}", end="", file=sys.stderr, flush=True)

    step("disk")
    disk = measure_disk(path)
    cpu = measure(step=step)
    step("accelerator")
    accelerator = measure_accelerator()
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return measured.keep(
        measured.Measured(cpu=cpu, accelerator=accelerator, disks={measured.disk_key(path): disk})
    )


def lines(report: dict[str, Any] | None) -> list[tuple[str, str]]:
    """(name, text) for the table of ``doctor``."""
    if report is None:
        return []
    cpu = report["cpu"]
    if cpu is None:
        return [("measured", "nothing yet; --measure takes some 20 seconds, plans need it")]
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(report["when"]))
    found = [("measured", f"{when}, {cpu['threads']} threads"), ("RAM", _memory(cpu))]
    found.append(
        (
            "arithmetic",
            f"{cpu['dot'] / 1e9:.0f} GOP/s of integer dots, {cpu['pairs'] / 1e9:.0f} GFLOP/s of "
            f"float products; of each core {cpu['dot'] / cpu['threads'] / 1e9:.0f} and "
            f"{cpu['pairs'] / cpu['threads'] / 1e9:.0f}",
        )
    )
    disk, accelerator = report["disk"], report["accelerator"]
    if disk is None:
        found.append(("disk", "not measured; --measure --path PATH does"))
    else:
        cached = "" if disk["direct"] else "; past the page cache is not possible there"
        found.append(
            (
                "disk",
                f"{format_rate(disk['read'])} of random reads, {disk['queue_depth']} at a time"
                f"{cached}",
            )
        )
    if accelerator is None:
        found.append(("accelerator", "none"))
    else:
        found.append(
            (
                "accelerator",
                f"{accelerator['name']}, {format_bytes(accelerator['memory'])}, "
                f"{format_rate(accelerator['read'])}, {accelerator['compute'] / 1e12:.3g} TFLOP/s, "
                f"bus {format_rate(accelerator['to_device'])} there, "
                f"{format_rate(accelerator['to_host'])} back",
            )
        )
    return found


def _memory(cpu: dict[str, Any]) -> str:
    read = cpu["read"]
    text = f"{format_rate(read['median'])} read by all threads"
    if read["greatest"] > _UNSTEADY * read["least"]:
        text += (
            f" (median; {format_rate(read['least'])} to {format_rate(read['greatest'])}: it "
            "changes from moment to moment here)"
        )
    if cpu["read_one"] is not None:
        text += f", {format_rate(cpu['read_one']['median'])} by one"
    for number, rate in enumerate(cpu["read_nodes"]):
        text += f", node {number} {format_rate(rate['median'])}"
    if cpu["copy"] is not None:
        text += f", {format_rate(cpu['copy']['median'])} copied"
    return text

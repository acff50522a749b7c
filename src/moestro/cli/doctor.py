"""``moestro doctor``: what this machine has and what Moestro makes of it."""

from __future__ import annotations

import dataclasses
import platform
from typing import Any

from moestro.cli._options import JsonOption
from moestro.cli._terminal import print_json
from moestro.core import env, log
from moestro.core.errors import MoestroError
from moestro.core.units import format_bytes

_PACKAGES = ("moestro", "torch", "numpy", "tokenizers", "jinja2", "huggingface_hub")


def doctor(as_json: JsonOption = False) -> None:
    """Show the machine, the instruction sets found and used, formats, memory and versions."""
    report = collect()
    if as_json:
        print_json(report)
    else:
        show(report)


def collect() -> dict[str, Any]:
    """The report as plain data: sizes in bytes."""
    from moestro import devices, formats
    from moestro.machine import facts

    machine = facts.gather()
    cache = env.cache_dir()
    return {
        "machine": dataclasses.asdict(machine),
        "threads": env.threads() or machine.threads,
        "native": _native(),
        "devices": devices.names(),
        "formats": formats.names(),
        "memory": {
            "total": machine.memory_total,
            "limit": machine.memory_limit,
            "budget": machine.memory_available,
        },
        "cache": {"path": str(cache), "disk_free": facts.disk_free(cache)},
        "fallbacks": log.fallbacks(),
        "versions": _versions(),
    }


def _native() -> dict[str, Any]:
    """The native core: instruction sets built, supported here, and the one in use."""
    try:
        from moestro import native
    except ImportError as error:
        return {"problem": f"the native core is not built: {error}"}
    except MoestroError as error:
        return {"problem": str(error)}
    return {
        "isa": native.isa(),
        "supported": list(native.supported_isas()),
        "built": list(native.built_isas()),
    }


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def show(report: dict[str, Any]) -> None:
    """The report as aligned lines for a person."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _lines(report):
        table.add_row(name, text)
    Console(highlight=False, markup=False).print(table)


def _lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    machine, native, memory = report["machine"], report["native"], report["memory"]
    usable = len(machine["usable_cpus"])
    cores = (
        f"{machine['physical_cores']} physical cores usable "
        f"({usable} of {machine['logical_cpus']} logical CPUs"
    )
    if machine["cpu_quota"] is not None:
        cores += f", quota {machine['cpu_quota']:g}"
    caches = ", ".join(
        f"L{c['level']} {c['kind'].lower()} {format_bytes(c['size'])} x{c['instances']}"
        for c in machine["caches"]
    )
    limit = f", limited to {format_bytes(memory['limit'])}" if memory["limit"] is not None else ""
    lines = [
        ("CPU", machine["cpu_model"]),
        ("cores", cores + ")"),
        ("features", " ".join(machine["features"]) or "none that matter"),
        ("caches", caches or "unknown"),
        ("NUMA nodes", str(machine["numa_nodes"])),
        ("memory", f"{format_bytes(memory['total'])}{limit}"),
        ("budget", f"{format_bytes(memory['budget'])} available now"),
        ("cache", f"{report['cache']['path']} ({format_bytes(report['cache']['disk_free'])} free)"),
    ]
    if "problem" in native:
        lines.append(("kernels", native["problem"]))
    else:
        others = [isa for isa in native["supported"] if isa != native["isa"]]
        lines.append(("kernels", f"{native['isa']} in use; also possible: {', '.join(others)}"))
    lines.append(("threads", str(report["threads"])))
    lines.append(("devices", ", ".join(report["devices"])))
    lines.append(("formats", ", ".join(report["formats"])))
    lines.append(("fallbacks", "; ".join(report["fallbacks"].values()) or "none"))
    lines.append(("versions", ", ".join(f"{k} {v}" for k, v in report["versions"].items())))
    return lines

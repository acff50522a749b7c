"""``moestro doctor``: what this machine has and what Moestro makes of it."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moestro.cli import _rates, _self_check
from moestro.cli._options import JsonOption
from moestro.cli._terminal import print_json
from moestro.core import env, log
from moestro.core.errors import InvalidRequest, MoestroError, SelfCheckError
from moestro.core.units import format_bytes

if TYPE_CHECKING:
    from moestro.machine.facts import MachineFacts

_HUGE_PAGE_TEST = 16 << 20
_PACKAGES = ("moestro", "torch", "numpy", "tokenizers", "jinja2", "huggingface_hub")


def doctor(
    as_json: JsonOption = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="measure memory, arithmetic, disk and accelerator (some 20 seconds) and keep it "
            "for plans",
        ),
    ] = False,
    path: Annotated[
        Path,
        typer.Option("--path", help="a file or directory on the disk to measure (with --measure)"),
    ] = Path("."),
) -> None:
    """Show the machine, what of it is used and how, and check every kernel on this CPU."""
    report = collect()
    if "problem" not in report["native"]:
        report["measured"] = _rates.collect(path.expanduser(), anew=measure)
    elif measure:
        raise InvalidRequest(report["native"]["problem"])
    if as_json:
        print_json(report)
    else:
        show(report)
    if _in_use_fails(report):
        raise typer.Exit(SelfCheckError.exit_code)


def collect() -> dict[str, Any]:
    """The report as plain data: sizes in bytes."""
    from moestro import devices, formats
    from moestro.machine import facts

    machine = facts.gather()
    cache = env.cache_dir()
    native = _native()
    return {
        "machine": dataclasses.asdict(machine) | {"physical_cores": machine.physical_cores},
        **_team(machine, native),
        "native": native,
        "self_check": {} if "problem" in native else _self_check.collect(native["built"]),
        "huge_pages": _huge_pages(machine.huge_pages),
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
        "same_bits": native.same_bits(),
        "folds": native.folds(),
        "uring_refusal": native.uring_refusal(),
    }


def _team(machine: MachineFacts, native: dict[str, Any]) -> dict[str, Any]:
    """The team a run would get, made here to see whether the system allows it."""
    from moestro import devices
    from moestro.machine.placement import place

    placed = place(
        machine,
        threads=env.threads(),
        pin=env.pin() or "auto",
        numa_nodes=env.numa_nodes(),
    )
    if "problem" not in native:
        devices.get("cpu").set_threads()  # notes a fallback if not
    return {"threads": placed.threads, "placement": dataclasses.asdict(placed)}


def _huge_pages(setting: str) -> dict[str, Any]:
    """The system's setting, and the part of some fresh memory for weights that got huge pages."""
    try:
        from moestro.memory.arena import aligned_buffer, huge_page_nbytes
    except (ImportError, MoestroError):  # without the native core there is no such memory
        return {"setting": setting, "share": None}
    fresh = aligned_buffer(_HUGE_PAGE_TEST)
    fresh.fill_(1)
    return {"setting": setting, "share": huge_page_nbytes(fresh) / _HUGE_PAGE_TEST}


def _in_use_fails(report: dict[str, Any]) -> bool:
    used = report["native"].get("isa")
    return any(isa == used for isa, _, _ in _self_check.failures(report["self_check"]))


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

    console = Console(highlight=False, markup=False)
    lines = Table(show_header=False, box=None, pad_edge=False)
    lines.add_column(style="bold", no_wrap=True)
    lines.add_column(overflow="fold")
    measured = _rates.lines(report.get("measured"))
    for name, text in [*_machine_lines(report), *_used_lines(report), *measured]:
        lines.add_row(name, text)
    console.print(lines)
    if report["self_check"]:
        console.print("\nself-check of the kernels (* in use, - not on this CPU)")
        for part in _self_check.render(report["self_check"], report["native"]["isa"], console):
            console.print(part)


def _machine_lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    machine, memory = report["machine"], report["memory"]
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
    nodes = ", ".join(
        f"node {n['number']}: {len(n['cpus'])} usable CPUs, {format_bytes(n['memory_free'])} of "
        f"{format_bytes(n['memory_total'])} free"
        for n in machine["numa_nodes"]
    )
    limit = f", limited to {format_bytes(memory['limit'])}" if memory["limit"] is not None else ""
    return [
        ("CPU", machine["cpu_model"]),
        ("cores", cores + ")"),
        ("features", " ".join(machine["features"]) or "none that matter"),
        ("caches", caches or "unknown"),
        ("NUMA", nodes),
        ("memory", f"{format_bytes(memory['total'])}{limit}"),
        ("budget", f"{format_bytes(memory['budget'])} available now"),
        ("huge pages", _huge_pages_line(report["huge_pages"])),
        ("cache", f"{report['cache']['path']} ({format_bytes(report['cache']['disk_free'])} free)"),
    ]


def _huge_pages_line(found: dict[str, Any]) -> str:
    setting = found["setting"] or "unknown"
    if found["share"] is None:
        return setting
    if found["share"] >= 1:
        return f"{setting}: weights get them"
    return (
        f"{setting}: weights get {found['share']:.0%}; decoding is up to a sixth slower without "
        "(/sys/kernel/mm/transparent_hugepage/enabled should say madvise or always)"
    )


def _threads_line(report: dict[str, Any]) -> str:
    placed = report["placement"]
    if "pin" in report["fallbacks"]:
        where = "not pinned (see fallbacks)"
    else:
        where = {
            "core": "each kept on a core of its own",
            "node": "kept on their node's cores",
            "none": "not pinned",
        }[placed["pin"]]
    nodes = len(placed["node_numbers"])
    sliced = f", weights sliced over {nodes} NUMA nodes" if nodes > 1 else ""
    return f"{report['threads']}, {where}{sliced}"


def _same_bits(native: dict[str, Any]) -> str:
    if "problem" in native:
        return "unknown"
    if not native["folds"]:
        return "yes, for integer formats (--no-same-bits has no effect here: it needs AMX)"
    return "yes, for integer formats; --no-same-bits takes fewer steps for long prompts"


def _disk_reads(native: dict[str, Any]) -> str:
    if "problem" in native:
        return "unknown"
    if native["uring_refusal"]:
        return f"by a pool of threads: {native['uring_refusal']}"
    return "through io_uring"


def _used_lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    native = report["native"]
    if "problem" in native:
        kernels = native["problem"]
    else:
        others = [isa for isa in native["supported"] if isa != native["isa"]]
        kernels = f"{native['isa']} in use"
        kernels += f"; also possible: {', '.join(others)}" if others else ""
    return [
        ("kernels", kernels),
        ("same bits", _same_bits(native)),
        ("threads", _threads_line(report)),
        ("disk reads", _disk_reads(native)),
        ("devices", ", ".join(report["devices"])),
        ("fallbacks", "; ".join(report["fallbacks"].values()) or "none"),
        ("versions", ", ".join(f"{k} {v}" for k, v in report["versions"].items())),
    ]

"""A forecast on screen: a table for people, plain data for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from moestro.core.units import format_bytes, format_rate

if TYPE_CHECKING:
    from moestro.machine.rates import MachineRates
    from moestro.memory.forecast import Forecast
    from moestro.memory.plan import Plan
    from moestro.memory.speed import Prediction

_PARTS = ("weights", "experts", "kv", "buffers", "staging", "pinned")
_TITLES = {"kv": "KV cache"}
_NAMES = {"ram": "RAM", "accelerator": "accelerator", "disk": "disk"}
#: a speed that changes by less is said not to change
_NOTICEABLE = 0.005


def report_of(forecast: Forecast, machine: MachineRates, model: str) -> dict[str, Any]:
    """Plain data: bytes, tokens per second, shares of time from 0 to 1."""
    plan = forecast.plan
    shape = plan.shape
    return {
        "model": model,
        "format": shape.format_name,
        "machine": {"name": machine.name, "measured": machine.measured},
        "verdict": forecast.verdict,
        "runnable": forecast.runnable,
        "sentence": forecast.sentence,
        "not_yet": list(forecast.not_yet),
        "context": plan.context,
        "concurrency": forecast.sequences,
        "kv_positions": plan.pages * plan.page_size,
        "tiers": {
            tier: {"budget": tally.budget, "total": tally.total, "missing": tally.missing}
            | {part: getattr(tally, part) for part in _PARTS}
            for tier, tally in plan.tiers.items()
        }
        | {"disk": {"experts": plan.disk}},
        "where": [{"what": what, "tier": tier} for what, tier in where(plan)],
        "slots": {str(layer): slots for layer, slots in plan.slots.items()},
        "misses": "profile" if forecast.counts_known else "uniform",
        "decode": _prediction(forecast.decode),
        "decode_at_full_context": _prediction(forecast.decode_full),
        "prefill": _prediction(forecast.prefill),
        "load_seconds": forecast.load_seconds,
        "one_more": [
            {"unit": gain.unit, "decode": gain.decode, "prefill": gain.prefill}
            for gain in forecast.gains
        ],
    }


def _prediction(found: Prediction) -> dict[str, Any]:
    return {"tok_s": found.tokens_per_second, "shares": dict(found.shares)}


def show(forecast: Forecast, machine: MachineRates) -> None:
    """The forecast for a person; fits a terminal of 80 columns and folds in narrower ones."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    plan = forecast.plan
    console.print(_title(plan))
    console.print(_machine_line(machine), style="dim")
    console.print()
    console.print(_bytes_table(plan))
    console.print()
    lines = Table(show_header=False, box=None, pad_edge=False)
    lines.add_column(style="bold", no_wrap=True)
    lines.add_column(overflow="fold")
    for name, text in _lines(forecast):
        lines.add_row(name, text)
    console.print(lines)


def _title(plan: Plan) -> str:
    shape = plan.shape
    experts = ""
    if shape.experts:
        one = shape.experts[0]
        experts = f", {one.num_experts} experts of which {one.top_k} per token"
    return (
        f"{shape.name}: {format_bytes(shape.weights_nbytes)} mostly in {shape.format_name}, "
        f"{len(shape.caches)} layers{experts}"
    )


def _machine_line(machine: MachineRates) -> str:
    cpu = machine.cpu
    parts = [f"{cpu.threads} threads", f"RAM {format_rate(cpu.read.median)}"]
    if cpu.read.spread > 1.25:
        low, high = format_rate(cpu.read.least), format_rate(cpu.read.greatest)
        parts[-1] += f" ({low} to {high}: it changes from moment to moment)"
    if machine.disk is not None:
        parts.append(f"disk {format_rate(machine.disk)}")
    if machine.accelerator is not None:
        found = machine.accelerator
        parts.append(f"{found.name} {format_bytes(found.memory)}, {format_rate(found.read)}")
    how = "measured" if machine.measured else "as described"
    return f"{machine.name}, {how}: {', '.join(parts)}"


def _bytes_table(plan: Plan) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    tiers = list(plan.tiers.items())
    for tier, _ in tiers:
        table.add_column(_NAMES[tier], justify="right")
    if plan.disk:
        table.add_column(_NAMES["disk"], justify="right")
    for part in _PARTS:
        sizes = [getattr(tally, part) for _, tally in tiers]
        disk = plan.disk if part == "experts" else 0
        if any(sizes) or disk:
            cells = [format_bytes(size) if size else "" for size in sizes]
            cells += [format_bytes(disk) if disk else ""] if plan.disk else []
            table.add_row(_TITLES.get(part, part), *cells)
    for name in ("total", "budget"):
        cells = [format_bytes(getattr(tally, name)) for _, tally in tiers]
        table.add_row(name, *cells, *([""] if plan.disk else []), style="bold")
    if not plan.fits:
        missing = [format_bytes(t.missing) if t.missing else "" for _, t in tiers]
        table.add_row("missing", *missing, *([""] if plan.disk else []), style="bold")
    return table


def _lines(forecast: Forecast) -> Iterator[tuple[str, str]]:
    plan = forecast.plan
    for index, (what, tier) in enumerate(where(plan)):
        yield ("where" if index == 0 else "", f"{what}: {_NAMES[tier]}")
    if plan.slots:
        few, many = min(plan.slots.values()), max(plan.slots.values())
        number = f"{few}" if few == many else f"{few} to {many}"
        kind = "measured" if forecast.counts_known else "uniform"
        yield "slots", f"{number} experts of a layer in RAM at a time ({kind} selections)"
    each = f" for {forecast.sequences} sequences" if forecast.sequences > 1 else ""
    yield "context", f"{plan.context} tokens, {plan.pages * plan.page_size} positions in the cache"
    yield "decode", f"{_speed(forecast.decode)}{each}"
    full = forecast.decode_full.tokens_per_second
    yield "", f"{full:.3g} tok/s at the end of the whole context"
    yield "prefill", _speed(forecast.prefill)
    if forecast.load_seconds is not None:
        yield "load", f"{_duration(forecast.load_seconds)} from a cold disk"
    gains = [text for gain in forecast.gains if (text := _gain(gain.unit, gain.decode, forecast))]
    if forecast.gains:
        yield "one more", "; ".join(gains) or "of anything alone changes little"
    yield "verdict", forecast.sentence


def _speed(found: Prediction) -> str:
    shares = ", ".join(f"{share:.0%} {name}" for name, share in found.shares.items()
                       if share >= 0.01)  # fmt: skip
    return f"{found.tokens_per_second:.3g} tok/s ({shares})"


def _gain(unit: str, more: float, forecast: Forecast) -> str:
    if more < _NOTICEABLE * forecast.decode.tokens_per_second:
        return ""
    return f"+{unit}: {more:+.2g} tok/s decode"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def where(plan: Plan) -> list[tuple[str, str]]:
    """(what, tier) in few words: neighbouring layers that are alike together."""
    found: dict[tuple[str, str], list[int]] = {}
    rest: list[tuple[str, str]] = []
    for group in plan.shape.groups:
        tier = plan.groups[group.key]
        if group.layer < 0:
            rest.append((group.key, tier))
        else:
            name = group.key.split(".")[-1]
            found.setdefault((name, tier), []).append(group.layer)
    if plan.placement is not None:
        for experts in plan.shape.experts:
            tiers: Sequence[str] = plan.placement.tiers[experts.layer]
            for place in dict.fromkeys(tiers):
                count = tiers.count(place)
                name = "experts" if count == len(tiers) else f"{count} experts each"
                found.setdefault((name, place), []).append(experts.layer)
    alike: dict[tuple[str, str], list[str]] = {}
    for (name, place), layers in found.items():
        alike.setdefault((_ranges(layers), place), []).append(name)
    lines = [(f"layers {span} {_joined(names)}", at) for (span, at), names in alike.items()]
    by_tier: dict[str, list[str]] = {}
    for name, place in rest:
        by_tier.setdefault(place, []).append(name)
    return lines + [(_joined(names), at) for at, names in by_tier.items()]


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _joined(names: Sequence[str]) -> str:
    return ", ".join(names)

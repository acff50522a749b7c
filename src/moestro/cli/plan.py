"""``moestro plan``: where a model would go, how fast it would run, and what would help."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from moestro.cli._models import resolve_model
from moestro.cli._options import FormatsOption, JsonOption, ModelArgument, RevisionOption
from moestro.cli._terminal import print_json
from moestro.core.errors import InvalidRequest
from moestro.core.units import parse_bytes

if TYPE_CHECKING:
    from moestro.machine.rates import MachineRates


MemoryOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--memory", help="RAM to plan with, for example 24GiB; default: available"),
]
AcceleratorOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--accelerator-memory",
        help="of the accelerator, for example 10GiB, 0 to leave it alone; default: nine tenths",
    ),
]
ContextOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--context", min=2, help="tokens a sequence may reach"),
]
ConcurrencyOption = Annotated[
    int, typer.Option("--concurrency", min=1, help="sequences at a time, at full length each")
]
PinOption = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--pin",
        help="what must be where, for example layers.0-9.experts=ram; tiers are accelerator, "
        "ram and disk; may be given several times",
    ),
]
MachineOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--machine", help="a YAML or JSON file that describes another machine"),
]


def plan(
    model: ModelArgument,
    memory: MemoryOption = None,
    accelerator_memory: AcceleratorOption = None,
    context: ContextOption = None,
    concurrency: ConcurrencyOption = 1,
    pin: PinOption = None,
    machine: MachineOption = None,
    formats: FormatsOption = None,
    as_json: JsonOption = False,
    revision: RevisionOption = None,
) -> None:
    """Plan a model from its headers: what goes where, how fast it runs, what would help."""
    from moestro.checkpoints import open_checkpoint
    from moestro.cli._plan_table import report_of, show
    from moestro.engine.config import EngineConfig
    from moestro.engine.forecast import forecast_checkpoint
    from moestro.memory.pins import Pin
    from moestro.memory.policy import FormatPolicy

    policy = FormatPolicy.parse(formats or "")
    pins = [Pin.parse(text) for text in pin or ()]
    config = EngineConfig(
        context=context,
        max_sequences=concurrency,
        max_batch_tokens=max(512, concurrency),
        memory=memory,
    )
    checkpoint = open_checkpoint(resolve_model(model), revision=revision)
    try:
        rates = _machine(config, machine, checkpoint.path)
        forecast = forecast_checkpoint(
            checkpoint,
            config,
            rates,
            policy=policy,
            accelerator_memory=_bytes(accelerator_memory),
            pins=pins,
        )
    finally:
        checkpoint.close()
    report = report_of(forecast, rates, model)
    if as_json:
        print_json(report)
    else:
        show(forecast, rates)


def _bytes(text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)


def _machine(config: Any, described: Path | None, model: Path) -> MachineRates:
    """The described machine, or this one, measured the first time."""
    from moestro.cli import _rates
    from moestro.engine.forecast import read_machine, this_machine

    if described is not None:
        return read_machine(described)
    found = this_machine(config, model)
    if found is None:
        print("moestro: measuring this machine once, some 20 seconds", file=sys.stderr)
        _rates.collect(model, anew=True)
        found = this_machine(config, model)
    if found is None:
        raise InvalidRequest(
            "what was measured of this machine could not be kept; see the cache directory in "
            "moestro doctor, or describe a machine (--machine FILE.yaml)"
        )
    return found

"""A forecast for a checkpoint from its headers, and what a run made of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from moestro import models
from moestro.checkpoints import Checkpoint
from moestro.core.errors import InvalidRequest
from moestro.engine.config import EngineConfig
from moestro.engine.plan import NOT_YET, USABLE, demand_of, ram_budget
from moestro.engine.shape import model_shape
from moestro.machine import measured
from moestro.machine.rates import MachineRates, describe
from moestro.memory.forecast import Forecast, make_forecast
from moestro.memory.model_shape import ModelShape
from moestro.memory.pins import Pin
from moestro.memory.plan import Budgets
from moestro.memory.policy import FormatPolicy
from moestro.memory.profile import load_profile, model_id

#: of an accelerator's memory; the rest is for its runtime
_ACCELERATOR_USABLE = 0.9


def forecast_checkpoint(
    checkpoint: Checkpoint,
    config: EngineConfig,
    machine: MachineRates,
    *,
    policy: FormatPolicy,
    accelerator_memory: int | None = None,
    pins: Sequence[Pin] = (),
) -> Forecast:
    """Plan a checkpoint on a machine; only its headers are read. ``config.memory`` is the budget of
    RAM, ``accelerator_memory`` that of the accelerator (bytes; 0: leave it alone); by default most
    of what the machine has. Each of ``config.max_sequences`` gets its whole context.

    Raises what describing and resolving the model raise, and as ``make_forecast``.
    """
    description = models.describe(checkpoint)
    shape = model_shape(checkpoint, description, policy, kv_dtype=config.kv_dtype)
    counts = None
    if shape.experts:
        profile = load_profile(
            model_id(checkpoint), {e.layer: e.num_experts for e in shape.experts}
        )
        counts = None if profile.is_empty else profile.counts("decode")
    asked = config.memory_bytes()
    accelerator = machine.accelerator
    if accelerator is None and accelerator_memory:
        raise InvalidRequest(
            f"there is no accelerator in {machine.name}, so --accelerator-memory has no meaning; "
            "describe a machine that has one (--machine)"
        )
    budget = None
    if accelerator is not None and accelerator_memory != 0:
        budget = accelerator_memory or int(accelerator.memory * _ACCELERATOR_USABLE)
    budgets = Budgets(
        ram=machine.memory if asked is None else asked,
        accelerator=budget,
        disk=machine.disk is not None,
    )
    return make_forecast(
        shape,
        machine,
        demand_of(config, guaranteed=config.max_sequences),
        budgets,
        pins=pins,
        counts=counts,
        missing=_not_yet(shape),
    )


def _not_yet(shape: ModelShape) -> dict[Any, str]:
    found: dict[Any, str] = dict(NOT_YET)
    if not shape.packed:
        found["disk"] = "experts stay on disk only in models that moestro convert has packed"
    return found


def this_machine(config: EngineConfig, path: Path) -> MachineRates | None:
    """What was measured here, with the memory that a run may take; None before that."""
    return measured.load().machine(memory=ram_budget(config), path=path)


def read_machine(path: Path) -> MachineRates:
    """A described machine from a YAML or JSON file (see ``docs/examples``). A run may use most of
    its memory. Raises InvalidRequest for a file that cannot be read or is none.
    """
    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise InvalidRequest(f"{path} is no description of a machine: {reason}") from error
    found = describe(raw, str(path))
    return MachineRates(
        name=found.name,
        memory=int(found.memory * USABLE),
        cpu=found.cpu,
        disk=found.disk,
        queue_depth=found.queue_depth,
        accelerator=found.accelerator,
    )

"""The memory of a run, decided by the one plan before any of it is allocated."""

from __future__ import annotations

from moestro.core.errors import OutOfBudget
from moestro.core.units import format_bytes
from moestro.engine.config import DEFAULT_CONTEXT, EngineConfig
from moestro.machine import facts
from moestro.memory.model_shape import ModelShape
from moestro.memory.pins import Tier
from moestro.memory.plan import Budgets, Demand, Plan, make_plan

#: part of the memory available now that a run may plan with; the rest is for what is not planned:
#: the interpreter, tokenizers, thread stacks, other programs
USABLE = 0.95

#: tiers that plans know and this version does not compute from, with what is said about it
NOT_YET: dict[Tier, str] = {
    "accelerator": "weights on an accelerator are planned, but not computed there yet",
}


def demand_of(config: EngineConfig, *, guaranteed: int = 1) -> Demand:
    """What the engine's options ask for. guaranteed: sequences at full length that must fit; the
    engine needs one, and lets the others share pages where memory is short.
    """
    return Demand(
        context=config.context,
        default_context=DEFAULT_CONTEXT,
        sequences=config.max_sequences,
        guaranteed=guaranteed,
        max_batch_tokens=config.max_batch_tokens,
        page_size=config.page_size,
    )


def ram_budget(config: EngineConfig) -> int:
    """Bytes a run may take: what was asked for, else most of what is available now."""
    asked = config.memory_bytes()
    return int(facts.available_memory() * USABLE) if asked is None else asked


def plan_memory(shape: ModelShape, config: EngineConfig, *, budget: int) -> Plan:
    """The plan of a run on the CPU; ``budget`` in bytes of RAM. Experts that do not fit stay on
    disk if the model was converted.

    Raises OutOfBudget with the numbers when not even one sequence fits, InvalidRequest for a
    context beyond the model's own.
    """
    plan = make_plan(shape, demand_of(config), Budgets(ram=budget))
    if not plan.fits and shape.packed and shape.experts:
        plan = make_plan(shape, demand_of(config), Budgets(ram=budget, disk=True))
    if not plan.fits:
        raise OutOfBudget(_shortfall(plan, config))
    return plan


def _shortfall(plan: Plan, config: EngineConfig) -> str:
    source = "the memory option" if config.memory is not None else "memory available now"
    ram = plan.ram
    rows = [
        ("weights", ram.weights + ram.experts, ""),
        ("KV cache", ram.kv, f"one sequence of {plan.context} tokens in {config.kv_dtype}"),
        ("buffers", ram.buffers, f"{config.max_batch_tokens} tokens a step"),
        ("total", ram.total, ""),
        ("budget", ram.budget, source),
        ("missing", ram.missing, ""),
    ]
    table = "\n".join(
        f"  {name:<9}{format_bytes(size):>10}{'  ' + text if text else ''}"
        for name, size, text in rows
    )
    convert = ""
    if plan.shape.experts and not plan.shape.packed:
        convert = (
            "\nOr convert the model once (moestro convert MODEL OUT) and run that: experts of a "
            "converted model are read from disk when they are needed"
        )
    return (
        f"the model does not fit into the memory budget:\n{table}\n"
        "Ways out: a smaller weight format (formats), a smaller context, fewer tokens a step "
        "(max_batch_tokens), or a larger budget (memory); moestro plan shows what each would do"
        + convert
    )

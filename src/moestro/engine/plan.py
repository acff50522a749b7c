"""How much memory a run takes, decided before any of it is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moestro.core.errors import InvalidRequest, OutOfBudget
from moestro.core.units import format_bytes
from moestro.engine.config import DEFAULT_CONTEXT, EngineConfig
from moestro.models.spec import ModelSpec

#: a context that was not asked for is not made smaller than this to fit; rather say what is missing
SMALLEST_CONTEXT = 512


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of each part against the budget, and the context and KV pages they pay for."""

    budget: int
    weights: int
    buffers: int
    page_bytes: int
    pages: int
    context: int

    @property
    def kv(self) -> int:
        """Bytes of the KV cache."""
        return self.pages * self.page_bytes

    @property
    def total(self) -> int:
        return self.weights + self.buffers + self.kv


def plan_memory(
    spec: ModelSpec,
    config: EngineConfig,
    *,
    weights: int,
    scratch_per_token: int,
    budget: int,
) -> MemoryPlan:
    """Choose context and pages. ``weights`` and ``budget`` in bytes; ``scratch_per_token``: bytes
    of activation buffers each token of a step needs.

    Every sequence may reach ``context``; pages for at least one of them at full length, for all
    ``max_sequences`` where memory allows. Raises OutOfBudget with the numbers when not even one
    fits, InvalidRequest for a context beyond the model's own.
    """
    if config.context is not None and config.context > spec.context_length:
        raise InvalidRequest(
            f"context {config.context} is more than the {spec.context_length} tokens this model "
            "was made for; choose a smaller one"
        )
    buffers = (
        config.max_batch_tokens * scratch_per_token
        + config.max_sequences * (spec.vocab_size + spec.hidden_size) * 4
    )
    dtype = getattr(torch, config.kv_dtype)
    page_bytes = config.page_size * sum(cache.position_nbytes(dtype) for cache in spec.caches)
    affordable = max(0, budget - weights - buffers) // page_bytes
    context = config.context or min(spec.context_length, DEFAULT_CONTEXT)
    per_sequence = -(-context // config.page_size)
    if config.context is None and affordable < per_sequence:
        floor = -(-min(context, SMALLEST_CONTEXT) // config.page_size)
        per_sequence = max(affordable, floor)
        context = min(context, per_sequence * config.page_size)
    plan = MemoryPlan(
        budget=budget,
        weights=weights,
        buffers=buffers,
        page_bytes=page_bytes,
        pages=max(per_sequence, min(affordable, per_sequence * config.max_sequences)),
        context=context,
    )
    if plan.total > budget:
        raise OutOfBudget(_shortfall(plan, config))
    return plan


def _shortfall(plan: MemoryPlan, config: EngineConfig) -> str:
    source = "the memory option" if config.memory is not None else "memory available now"
    rows = [
        ("weights", plan.weights, ""),
        ("KV cache", plan.kv, f"one sequence of {plan.context} tokens in {config.kv_dtype}"),
        ("buffers", plan.buffers, f"{config.max_batch_tokens} tokens a step"),
        ("total", plan.total, ""),
        ("budget", plan.budget, source),
        ("missing", plan.total - plan.budget, ""),
    ]
    table = "\n".join(
        f"  {name:<9}{format_bytes(size):>10}{'  ' + text if text else ''}"
        for name, size, text in rows
    )
    return (
        f"the model does not fit into the memory budget:\n{table}\n"
        "Ways out: a smaller weight format (formats), a smaller context, fewer tokens a step "
        "(max_batch_tokens), or a larger budget (memory)"
    )

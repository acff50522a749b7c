"""From what a user names to an engine that is ready: open, describe, plan, load, build."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from moestro import devices, models
from moestro.checkpoints import Checkpoint, open_checkpoint
from moestro.core.errors import CheckpointError
from moestro.devices.base import Accelerator
from moestro.engine import hybrid
from moestro.engine.config import EngineConfig
from moestro.engine.engine import Engine
from moestro.engine.plan import plan_memory, ram_budget
from moestro.engine.shape import is_routed, model_shape
from moestro.memory.loader import load_weights
from moestro.memory.placement import Placement
from moestro.memory.plan import Plan
from moestro.memory.policy import FormatPolicy
from moestro.memory.streamed_bank import Streaming
from moestro.models.spec import ModelDescription
from moestro.text import Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """An engine with its tokenizer and the facts of how it came to be.

    format_name: the format that holds most of the weights' bytes. isa: the instruction set or
    library that computes. load_seconds: from opening to ready. streaming: what is read from disk
    while the model runs; None if all of it is in memory. placement: which experts are on the
    accelerator and which in RAM, if the device is one.
    """

    engine: Engine
    tokenizer: Tokenizer
    description: ModelDescription
    plan: Plan
    format_name: str
    isa: str
    threads: int
    load_seconds: float
    streaming: Streaming | None = None
    placement: Placement | None = None


def load_engine(
    model: str | os.PathLike[str],
    config: EngineConfig,
    *,
    device: str = "cpu",
    formats: str | None = None,
    revision: str | None = None,
    offline: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Loaded:
    """Open a checkpoint and make an engine of it; ``progress(done, total)`` counts bytes.

    Everything that can be refused from headers is refused before a weight is read: unknown options,
    architectures and formats, kernels that compute wrongly on this machine (SelfCheckError),
    missing tensors, a context the model does not have, and memory that does not suffice
    (OutOfBudget).
    """
    start = time.monotonic()
    policy = FormatPolicy.parse(formats or "")
    target = devices.get(device)
    hybrid.require_accelerator(config, target)
    threads = target.set_threads(config.threads, pin=config.pin, numa_nodes=config.numa_nodes)
    target.set_same_bits(config.same_bits)
    checkpoint = open_checkpoint(model, revision=revision, offline=offline)
    try:
        description = models.describe(checkpoint)
        shape = model_shape(checkpoint, description, policy, kv_dtype=config.kv_dtype)
        target.check_formats(shape.format_names)
        plan = plan_memory(shape, config, budget=ram_budget(config))
        hybrid.require_all_in_memory(plan, target)
        tokenizer = load_tokenizer(checkpoint)
        _check_vocabulary(checkpoint, tokenizer, description)
        slots = {
            spec.key: plan.slots[spec.layer]
            for spec in description.weights
            if is_routed(spec) and spec.layer in plan.slots
        }
        weights = load_weights(
            checkpoint, description.weights, policy=policy, progress=progress, slots=slots
        )
    finally:
        checkpoint.close()
    placement = None
    if isinstance(target, Accelerator):
        kv, buffers = plan.ram.kv, plan.ram.buffers
        placement = hybrid.divide(target, description, weights, config, kv=kv, buffers=buffers)
    built = models.build(description, weights, target, max_positions=plan.context)
    engine = Engine(built, tokenizer, config.replace(context=plan.context), pages=plan.pages)
    return Loaded(
        engine=engine,
        tokenizer=tokenizer,
        description=description,
        plan=plan,
        format_name=shape.format_name,
        isa=target.isa,
        threads=threads,
        load_seconds=time.monotonic() - start,
        streaming=Streaming.of(weights.values()),
        placement=placement,
    )


def _check_vocabulary(
    checkpoint: Checkpoint, tokenizer: Tokenizer, description: ModelDescription
) -> None:
    """A tokenizer may know fewer tokens than the model (padding), never more."""
    if tokenizer.vocab_size > description.spec.vocab_size:
        raise CheckpointError(
            f"{checkpoint.path}: the tokenizer has {tokenizer.vocab_size} tokens, the model only "
            f"{description.spec.vocab_size}; tokenizer and weights do not belong together"
        )

"""From what a user names to an engine that is ready: open, describe, plan, load, build."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from moestro import devices, models
from moestro.checkpoints import Checkpoint, open_checkpoint
from moestro.checkpoints.packed import PackedCheckpoint
from moestro.core.errors import CheckpointError
from moestro.engine.config import EngineConfig
from moestro.engine.engine import Engine
from moestro.engine.plan import MemoryPlan, plan_memory
from moestro.formats.base import PackedWeight
from moestro.machine import facts
from moestro.memory.expert_bank import ExpertBank
from moestro.memory.loader import Weights, load_weights
from moestro.memory.policy import FormatPolicy
from moestro.memory.sources import ExpertsSource, resolve
from moestro.memory.weights import WeightSpec
from moestro.models.spec import ModelDescription
from moestro.text import Tokenizer, load_tokenizer

#: part of the memory available now that a run may plan with; the rest is for what is not planned:
#: the interpreter, tokenizers, thread stacks, other programs
_USABLE = 0.95


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """An engine with its tokenizer and the facts of how it came to be.

    format_name: the format that holds most of the weights' bytes. isa: the instruction set or
    library that computes. load_seconds: from opening to ready.
    """

    engine: Engine
    tokenizer: Tokenizer
    description: ModelDescription
    plan: MemoryPlan
    format_name: str
    isa: str
    threads: int
    load_seconds: float


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
    threads = target.set_threads(config.threads, pin=config.pin, numa_nodes=config.numa_nodes)
    target.set_same_bits(config.same_bits)
    checkpoint = open_checkpoint(model, revision=revision, offline=offline)
    try:
        description = models.describe(checkpoint)
        target.check_formats(weight_formats(checkpoint, description.weights, policy))
        plan = plan_memory(
            description.spec,
            config,
            weights=weights_nbytes(checkpoint, description.weights, policy),
            scratch_per_token=_scratch_per_token(description),
            budget=_budget(config),
        )
        tokenizer = load_tokenizer(checkpoint)
        _check_vocabulary(checkpoint, tokenizer, description)
        weights = load_weights(checkpoint, description.weights, policy=policy, progress=progress)
    finally:
        checkpoint.close()
    built = models.build(description, weights, target, max_positions=plan.context)
    engine = Engine(built, tokenizer, config.replace(context=plan.context), pages=plan.pages)
    return Loaded(
        engine=engine,
        tokenizer=tokenizer,
        description=description,
        plan=plan,
        format_name=_main_format(weights),
        isa=target.isa,
        threads=threads,
        load_seconds=time.monotonic() - start,
    )


def _budget(config: EngineConfig) -> int:
    asked = config.memory_bytes()
    return int(facts.available_memory() * _USABLE) if asked is None else asked


def weights_nbytes(checkpoint: Checkpoint, specs: list[WeightSpec], policy: FormatPolicy) -> int:
    """Bytes the weights will take in memory, from headers alone."""
    if isinstance(checkpoint, PackedCheckpoint):
        present = set(checkpoint.names())
        return sum(checkpoint.info(s.key).nbytes for s in specs if s.key in present)
    total = 0
    for source in resolve(checkpoint, specs, policy):
        if isinstance(source, ExpertsSource):
            total += source.layout.nbytes * source.num_experts
        elif source.format is None:
            total += 4 * math.prod(source.spec.shape)
        else:
            total += source.format.nbytes(source.rows, source.cols)
    return total


def weight_formats(
    checkpoint: Checkpoint, specs: list[WeightSpec], policy: FormatPolicy
) -> set[str]:
    """Names of the formats the weights will have in memory, from headers alone."""
    if isinstance(checkpoint, PackedCheckpoint):
        present = set(checkpoint.names())
        entries = [checkpoint.entry(s.key) for s in specs if s.key in present]
        names = {entry.format_name for entry in entries if entry.kind == "matrix"}
        return names | {part.format_name for entry in entries for part in entry.parts}
    names = set()
    for source in resolve(checkpoint, specs, policy):
        if isinstance(source, ExpertsSource):
            names |= {part.format.name for part in source.parts}
        elif source.format is not None:
            names.add(source.format.name)
    return names


def _scratch_per_token(description: ModelDescription) -> int:
    """Bytes of activation buffers per token of a step, from above: the residual stream and its
    normed copy, and one float32 output of each matrix of the widest layer, as no buffer is shared
    between unlike outputs.
    """
    widths: Counter[int] = Counter()
    for spec in description.weights:
        if spec.kind == "matrix" and spec.layer >= 0:
            widths[spec.layer] += spec.shape[0]
        elif spec.kind == "experts":
            widths[spec.layer] += 2 * spec.shape[0] + spec.shape[2]
    return 4 * (2 * description.spec.hidden_size + max(widths.values(), default=0))


def _check_vocabulary(
    checkpoint: Checkpoint, tokenizer: Tokenizer, description: ModelDescription
) -> None:
    """A tokenizer may know fewer tokens than the model (padding), never more."""
    if tokenizer.vocab_size > description.spec.vocab_size:
        raise CheckpointError(
            f"{checkpoint.path}: the tokenizer has {tokenizer.vocab_size} tokens, the model only "
            f"{description.spec.vocab_size}; tokenizer and weights do not belong together"
        )


def _main_format(weights: Weights) -> str:
    sizes: Counter[str] = Counter()
    for weight in weights.values():
        if isinstance(weight, ExpertBank):
            sizes[weight.projections[0].format_name] += weight.nbytes
        elif isinstance(weight, PackedWeight):
            sizes[weight.format_name] += weight.nbytes
    return sizes.most_common(1)[0][0] if sizes else ""

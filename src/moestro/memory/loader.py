"""Loads a model's weights into RAM, one tensor or one expert at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from moestro.checkpoints.base import Checkpoint
from moestro.checkpoints.packed import PackedCheckpoint
from moestro.formats.base import PackedWeight
from moestro.memory.arena import HugePageArena
from moestro.memory.expert_bank import ExpertBank
from moestro.memory.packed_reader import load_packed
from moestro.memory.packing import Packer
from moestro.memory.policy import FormatPolicy
from moestro.memory.sources import ExpertsSource, Source, resolve
from moestro.memory.weights import WeightSpec

Progress = Callable[[int, int], None]
Weights = dict[str, PackedWeight | Tensor | ExpertBank]


def load_weights(
    checkpoint: Checkpoint,
    specs: Sequence[WeightSpec],
    *,
    policy: FormatPolicy,
    progress: Progress | None = None,
) -> Weights:
    """Load every spec: matrices as PackedWeight, vectors as float32, experts as ExpertBank, by key.

    With an empty policy every weight keeps the checkpoint's values exactly; formats that the policy
    names are quantized to. ``progress(done, total)`` counts bytes read from the checkpoint.

    Raises CheckpointError for missing, misshapen or non-finite weights; UnsupportedFormat for types
    without an exact format; OutOfBudget when memory does not suffice.
    """
    report = progress or (lambda done, total: None)
    if isinstance(checkpoint, PackedCheckpoint):
        return load_packed(checkpoint, specs, policy, report)
    sources = resolve(checkpoint, specs, policy)
    total = sum(source.source_nbytes for source in sources)
    weights: Weights = {}
    done = 0
    report(done, total)
    with Packer(checkpoint) as packer:
        for source in sources:
            key = source.spec.key
            if isinstance(source, ExpertsSource):
                weights[key] = _load_experts(packer, source, done, total, report)
            else:
                weights[key] = _load_one(packer, source)
            done += source.source_nbytes
            report(done, total)
    return _on_huge_pages(weights)


def _on_huge_pages(weights: Weights) -> Weights:
    """Moves the matrices, one at a time: experts have huge pages from the start."""
    arena = HugePageArena()
    for key, weight in weights.items():
        if isinstance(weight, PackedWeight):
            weights[key] = replace(weight, data=arena.copy(weight.data))
    return weights


def _load_one(packer: Packer, source: Source) -> PackedWeight | Tensor:
    if source.format is None:
        return packer.vector(source)
    return PackedWeight(
        format=source.format,
        rows=source.rows,
        cols=source.cols,
        data=packer.matrix(source),
        name=source.spec.key,
    )


def _load_experts(
    packer: Packer, source: ExpertsSource, done: int, total: int, report: Progress
) -> ExpertBank:
    spec = source.spec
    bank = ExpertBank(source.layout, source.num_experts, activation=spec.activation, name=spec.key)
    for index in range(source.num_experts):
        bank.layout.fill(bank.blob(index), packer.expert(source, index))
        report(done + source.source_nbytes * (index + 1) // source.num_experts, total)
    return bank

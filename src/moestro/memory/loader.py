"""Loads a model's weights into RAM: each tensor or expert is packed straight into its place, while
the next ones are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import cast

from torch import Tensor

from moestro.checkpoints.base import Checkpoint
from moestro.checkpoints.packed import PackedCheckpoint
from moestro.formats.base import PackedWeight
from moestro.memory.arena import HugePageArena
from moestro.memory.expert_bank import ExpertBank
from moestro.memory.input_orders import attach_orders, with_orders
from moestro.memory.packed_reader import load_packed
from moestro.memory.packing import Packer
from moestro.memory.policy import FormatPolicy
from moestro.memory.read_ahead import MIN_THREADS, Read, read_ahead
from moestro.memory.sources import ExpertsSource, Resolved, Source, resolve
from moestro.memory.stored_rows import StoredRows
from moestro.memory.weights import WeightSpec

Progress = Callable[[int, int], None]
Weights = dict[str, PackedWeight | Tensor | ExpertBank]


def load_weights(
    checkpoint: Checkpoint,
    specs: Sequence[WeightSpec],
    *,
    policy: FormatPolicy,
    progress: Progress | None = None,
    slots: Mapping[str, int] | None = None,
) -> Weights:
    """Load every spec: matrices as PackedWeight, vectors as float32, experts as ExpertBank, by key.

    With an empty policy every weight keeps the checkpoint's values exactly; formats that the policy
    names are quantized to. ``progress(done, total)`` counts bytes read from the checkpoint. slots:
    of a packed model, how many experts of a layer are kept in memory, by key; without all of them.

    Raises CheckpointError for missing, misshapen or non-finite weights; UnsupportedFormat for types
    without an exact format; OutOfBudget when memory does not suffice.
    """
    report = progress or (lambda done, total: None)
    if isinstance(checkpoint, PackedCheckpoint):
        return load_packed(checkpoint, specs, policy, report, slots)
    sources = with_orders(checkpoint, resolve(checkpoint, specs, policy))
    total = sum(source.source_nbytes for source in sources)
    weights: Weights = {}
    arena = HugePageArena()
    done = 0
    report(done, total)
    banks: dict[str, ExpertBank] = {}
    with Packer(checkpoint) as packer, ExitStack() as stack:
        threads = max(packer.threads, MIN_THREADS)
        read = read_ahead(_reads(packer, sources, banks), threads=threads)
        stack.enter_context(closing(read))
        for source in sources:
            key = source.spec.key
            if isinstance(source, ExpertsSource):
                # Its first read made the bank.
                for index in range(source.num_experts):
                    stored = next(read)
                    if stored is not None:
                        experts = cast("list[StoredRows]", stored)
                        packer.pack_expert(source, index, experts, banks[key].blob(index))
                    report(done + source.source_nbytes * (index + 1) // source.num_experts, total)
                weights[key] = banks.pop(key)
            else:
                weights[key] = _load_one(packer, source, read, arena)
            done += source.source_nbytes
            report(done, total)
    attach_orders(weights)
    return weights


# What is read of one vector, matrix or expert; None: it is in its bank already.
_Stored = Tensor | StoredRows | list[StoredRows] | None


def _reads(
    packer: Packer, sources: Sequence[Resolved], banks: dict[str, ExpertBank]
) -> Iterator[Read[_Stored]]:
    """One per vector, matrix and expert, in the order in which they are packed. Experts that are
    only repacked are so by the thread that reads them: then no thread waits for another.
    """
    for source in sources:
        if not isinstance(source, ExpertsSource):
            run = packer.vector if source.format is None else packer.read_matrix
            yield Read(nbytes=source.source_nbytes, run=partial(run, source))
            continue
        spec, alone = source.spec, packer.packs_alone(source)
        bank = ExpertBank(
            source.layout, source.num_experts, activation=spec.activation, name=spec.key
        )
        banks[spec.key] = bank
        nbytes = source.source_nbytes // source.num_experts
        for index in range(source.num_experts):
            yield Read(
                nbytes=nbytes,
                run=partial(packer.load_expert, source, index, bank.blob(index))
                if alone
                else partial(packer.read_expert, source, index),
            )


def _load_one(
    packer: Packer, source: Source, read: Iterator[_Stored], arena: HugePageArena
) -> PackedWeight | Tensor:
    stored = next(read)
    if source.format is None:
        return cast(Tensor, stored)
    data = arena.matrix(source.rows, source.format.nbytes(source.rows, source.cols))
    packer.pack_matrix(source, cast(StoredRows, stored), data)
    return PackedWeight(
        format=source.format,
        rows=source.rows,
        cols=source.cols,
        data=data,
        name=source.spec.key,
    )

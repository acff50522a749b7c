"""Loads a packed model: bytes go into place as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moestro import formats
from moestro.checkpoints.packed import PackedCheckpoint, PackedEntry
from moestro.core.errors import CheckpointError, InvalidRequest
from moestro.formats.base import PackedWeight, require_finite
from moestro.memory.expert_bank import BlobLayout, ExpertBank
from moestro.memory.policy import FormatPolicy
from moestro.memory.weights import WeightSpec

# Blobs are read several at a time up to this size: fewer, longer reads.
_READ_NBYTES = 1 << 26
_SHOWN = 8


def load_packed(
    checkpoint: PackedCheckpoint,
    specs: Sequence[WeightSpec],
    policy: FormatPolicy,
    report: Callable[[int, int], None],
) -> dict[str, PackedWeight | Tensor | ExpertBank]:
    """Every spec's weight by key. Raises CheckpointError if the directory does not hold what the
    model needs, InvalidRequest if the policy names another format than it was converted to.
    """
    present = set(checkpoint.names())
    missing = [s.key for s in specs if s.key not in present and not s.optional]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} lacks {len(missing)} weights that the model needs: "
            f"{', '.join(missing[:_SHOWN])}; convert the model again"
        )
    wanted = [(spec, checkpoint.entry(spec.key)) for spec in specs if spec.key in present]
    for spec, entry in wanted:
        _check(checkpoint, spec, entry, policy)
    total = sum(entry.info.nbytes for _, entry in wanted)
    done = 0
    report(done, total)
    weights: dict[str, PackedWeight | Tensor | ExpertBank] = {}
    for spec, entry in wanted:
        if entry.kind == "experts":
            weights[spec.key] = _load_experts(checkpoint, spec, entry, done, total, report)
        elif entry.kind == "matrix":
            weights[spec.key] = PackedWeight(
                format=formats.get(entry.format_name),
                rows=entry.shape[0],
                cols=entry.shape[1],
                data=checkpoint.read(spec.key),
                name=spec.key,
            )
        else:
            values = checkpoint.read(spec.key).view(torch.float32).view(spec.shape)
            require_finite(values, f"{checkpoint.path}: {spec.key}")
            weights[spec.key] = values
        done += entry.info.nbytes
        report(done, total)
    return weights


def _check(
    checkpoint: PackedCheckpoint, spec: WeightSpec, entry: PackedEntry, policy: FormatPolicy
) -> None:
    where = f"{checkpoint.path}: {spec.key}"
    if entry.kind != spec.kind or entry.shape != spec.shape:
        raise CheckpointError(
            f"{where} should be {spec.kind} {list(spec.shape)} but is {entry.kind} "
            f"{list(entry.shape)}; config.json and weights do not belong together"
        )
    if entry.kind == "experts":
        _layout(where, entry)
    stored = [(spec.key, entry.format_name)] if entry.kind == "matrix" else []
    stored += [
        (f"{spec.key}.{name}", part.format_name)
        for name, part in zip(("gate", "up", "down"), entry.parts, strict=False)
    ]
    for key, name in stored:
        asked = policy.name_for(key, spec.role, name)
        if asked is not None and asked != name:
            raise InvalidRequest(
                f"{where} was converted to {name}, so it cannot be loaded as {asked}; leave the "
                "format out, or convert the original model again"
            )


def _layout(where: str, entry: PackedEntry) -> BlobLayout:
    """The layout the kernels expect for the entry's formats; the file must have exactly it."""
    _, intermediate, hidden = entry.shape
    gate, up, down = entry.parts
    shapes = [(part.rows, part.cols) for part in (gate, up, down)]
    layout = BlobLayout.plan([(p.format_name, p.rows, p.cols) for p in entry.parts])
    if (
        shapes != [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
        or layout.nbytes != entry.blob_nbytes
        or [p.offset for p in layout.projections] != [p.offset for p in entry.parts]
    ):
        raise CheckpointError(
            f"{where}: moestro.json places gate, up and down elsewhere than this version does; "
            "convert the model again"
        )
    return layout


def _load_experts(
    checkpoint: PackedCheckpoint,
    spec: WeightSpec,
    entry: PackedEntry,
    done: int,
    total: int,
    report: Callable[[int, int], None],
) -> ExpertBank:
    key, count = spec.key, entry.shape[0]
    bank = ExpertBank(_layout(key, entry), count, activation=spec.activation, name=key)
    step = max(1, _READ_NBYTES // entry.blob_nbytes)
    for start in range(0, count, step):
        stop = min(start + step, count)
        begin, end = start * entry.blob_nbytes, stop * entry.blob_nbytes
        bank.buffer[begin:end] = checkpoint.read(key, (start, stop))
        report(done + end, total)
    return bank

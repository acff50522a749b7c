"""Loads a packed model: bytes are read straight into the memory they are used from.

Several threads read at once: one alone waits for a fast disk, and for the kernel to copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from moestro import formats
from moestro.checkpoints.packed import PackedCheckpoint, PackedEntry
from moestro.core.errors import CheckpointError, InvalidRequest
from moestro.formats.base import PackedWeight, require_finite
from moestro.memory.arena import HugePageArena
from moestro.memory.expert_bank import BlobLayout, ExpertBank
from moestro.memory.input_orders import attach_orders, order_spec
from moestro.memory.policy import FormatPolicy
from moestro.memory.streamed_bank import BlobsOnDisk, ExpertFiles, StreamedBank
from moestro.memory.weights import WeightSpec

# What one thread reads at a time: long for the disk, short enough to show progress.
_READ_NBYTES = 1 << 24
_THREADS = 8
_SHOWN = 8


def load_packed(
    checkpoint: PackedCheckpoint,
    specs: Sequence[WeightSpec],
    policy: FormatPolicy,
    report: Callable[[int, int], None],
    slots: Mapping[str, int] | None = None,
) -> dict[str, PackedWeight | Tensor | ExpertBank]:
    """Every spec's weight by key; experts with fewer ``slots`` than there are stay on disk, in a
    StreamedBank. Raises CheckpointError if the directory does not hold what the
    model needs, InvalidRequest if the policy names another format than it was converted to.
    """
    present = set(checkpoint.names())
    missing = [s.key for s in specs if s.key not in present and not s.optional]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} lacks {len(missing)} weights that the model needs: "
            f"{', '.join(missing[:_SHOWN])}; convert the model again"
        )
    orders = [order_spec(spec) for spec in specs if spec.kind != "vector"]
    wanted = [(s, checkpoint.entry(s.key)) for s in [*specs, *orders] if s.key in present]
    for spec, entry in wanted:
        _check(checkpoint, spec, entry, policy)
    weights: dict[str, PackedWeight | Tensor | ExpertBank] = {}
    arena = HugePageArena()
    few = {k: n for k, n in (slots or {}).items() if n < checkpoint.entry(k).shape[0]}
    files = ExpertFiles(checkpoint.entry(key).info.file for key in few) if few else None
    total = sum(entry.info.nbytes for spec, entry in wanted if spec.key not in few)
    with _Reads(checkpoint, total, report) as reads:
        for spec, entry in wanted:
            if files is not None and spec.key in few:
                weights[spec.key] = StreamedBank(
                    _layout(spec.key, entry),
                    entry.shape[0],
                    slots=few[spec.key],
                    blobs=BlobsOnDisk(files=files, path=entry.info.file, offset=entry.info.offset),
                    activation=spec.activation,
                    name=spec.key,
                )
                continue
            if entry.kind == "experts":
                layout, count = _layout(spec.key, entry), entry.shape[0]
                bank = ExpertBank(layout, count, activation=spec.activation, name=spec.key)
                reads.fill(spec.key, bank.buffer)
                weights[spec.key] = bank
                continue
            nbytes = entry.info.nbytes
            is_matrix = entry.kind == "matrix"
            data = arena.matrix(entry.shape[0], nbytes) if is_matrix else arena.take(nbytes)
            reads.fill(spec.key, data)
            if is_matrix:
                weights[spec.key] = PackedWeight(
                    format=formats.get(entry.format_name),
                    rows=entry.shape[0],
                    cols=entry.shape[1],
                    data=data,
                    name=spec.key,
                )
            else:
                values = data.view(torch.float32).view(spec.shape)
                require_finite(values, f"{checkpoint.path}: {spec.key}")
                weights[spec.key] = values
    attach_orders(weights)
    return weights


class _Reads:
    """Reads of one load, on several threads; a context manager, which ends them.

    ``report(done, total)`` is called from the thread that loads alone, in rising order.
    """

    def __init__(
        self, checkpoint: PackedCheckpoint, total: int, report: Callable[[int, int], None]
    ) -> None:
        self._checkpoint = checkpoint
        self._total = total
        self._report = report
        self._done = 0
        self._pool = ThreadPoolExecutor(_THREADS, "moestro-read")

    def __enter__(self) -> _Reads:
        self._report(0, self._total)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def fill(self, key: str, out: Tensor) -> None:
        """All bytes of a weight into ``out``."""

        def read(start: int) -> int:
            piece = out[start : start + _READ_NBYTES]
            self._checkpoint.read_into(key, start, piece)
            return piece.numel()

        for nbytes in self._pool.map(read, range(0, out.numel(), _READ_NBYTES)):
            self._done += nbytes
            self._report(self._done, self._total)


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

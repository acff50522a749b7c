"""Experts that stay on disk: a bank with room for some of a layer's experts, and what it has done.

The native cache of a bank (see ``csrc/tiers``) decides which experts are in memory, and reads the
others when a step needs them, inside the MoE op. No Python runs then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moestro import native
from moestro.core.errors import StorageError
from moestro.core.units import format_bytes
from moestro.memory.expert_bank import BlobLayout, ExpertBank

#: reads in flight at a time: enough for the drives that were measured, see benchmarks/bench_disk.py
QUEUE_DEPTH = 8


class ExpertFiles:
    """The files that a model's experts are read from, shared by all of its layers.

    Raises StorageError for what cannot be opened.
    """

    def __init__(self, paths: Iterable[Path], *, queue_depth: int = QUEUE_DEPTH) -> None:
        self.paths = tuple(dict.fromkeys(paths))
        self.queue_depth = queue_depth
        self.reader = native.BlockReader([[str(p)] for p in self.paths], queue_depth=queue_depth)

    def index(self, path: Path) -> int:
        return self.paths.index(path)


@dataclass(frozen=True, kw_only=True)
class BlobsOnDisk:
    """Where a layer's blobs begin: ``offset`` (a multiple of 4096) of a file among ``files``."""

    files: ExpertFiles
    path: Path
    offset: int


class StreamedBank(ExpertBank):
    """All E experts of one layer, of which ``slots`` at a time are in memory.

    ``buffer`` holds the slots. ``pointers`` are all zero: only ``cache`` knows where an expert is.
    ``policy``: which expert leaves, one of ``native.cache_policies()``, or ``auto`` for the one
    that would have missed least.
    """

    def __init__(
        self,
        layout: BlobLayout,
        num_experts: int,
        *,
        slots: int,
        blobs: BlobsOnDisk,
        policy: str = "auto",
        activation: str = "silu",
        name: str = "experts",
    ) -> None:
        super().__init__(layout, slots, activation=activation, name=name)
        self.slots = slots
        self.num_experts = num_experts
        self.pointers = torch.zeros(num_experts, dtype=torch.int64)
        self.blobs = blobs
        self.cache = native.ExpertCache.make(
            blobs.files.reader,
            blobs.files.index(blobs.path),
            blobs.offset,
            layout.nbytes,
            self.buffer,
            num_experts,
            policy=policy,
            queue_depth=blobs.files.queue_depth,
        )

    def blob(self, index: int) -> Tensor:
        """One expert's bytes, uint8 [layout.nbytes], read from disk into memory of their own."""
        self._require(index)
        try:
            with open(self.blobs.path, "rb", buffering=0) as file:
                file.seek(self.blobs.offset + index * self.layout.nbytes)
                data = bytearray(self.layout.nbytes)
                got = file.readinto(data)
        except OSError as error:
            raise StorageError(f"{self.blobs.path}: {error.strerror}") from error
        if got != len(data):
            raise StorageError(
                f"{self.blobs.path}: expert {index} ends after {got} of {len(data)} bytes"
            )
        return torch.frombuffer(data, dtype=torch.uint8)

    def __repr__(self) -> str:
        names = "/".join(part.format_name for part in self.projections)
        return (
            f"<StreamedBank {self.name}: {self.num_experts} x {names}, {self.slots} in "
            f"{format_bytes(self.nbytes)}>"
        )


@dataclass(frozen=True, kw_only=True)
class StreamStats:
    """What streaming has done since the model was loaded, all layers together.

    experts, slots: of all layers. hits, misses: experts that a step's chunk found in memory or had
    to read, counted once per chunk and layer. nbytes: read. seconds: with reads in flight.
    policies: number of layers that use each. shadow_misses: what each policy would have missed.
    """

    experts: int
    slots: int
    hits: int
    misses: int
    decode_hits: int
    decode_misses: int
    nbytes: int
    seconds: float
    policies: dict[str, int]
    shadow_misses: dict[str, int]

    @property
    def hit_rate(self) -> float:
        """Part of the needed experts that were in memory; 1 where none was needed."""
        return self.hits / max(self.hits + self.misses, 1) if self.misses else 1.0

    @property
    def rate(self) -> float:
        """Bytes per second while reads were in flight."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    def since(self, before: StreamStats) -> StreamStats:
        """The part of it that came after ``before``."""
        return StreamStats(
            experts=self.experts,
            slots=self.slots,
            hits=self.hits - before.hits,
            misses=self.misses - before.misses,
            decode_hits=self.decode_hits - before.decode_hits,
            decode_misses=self.decode_misses - before.decode_misses,
            nbytes=self.nbytes - before.nbytes,
            seconds=self.seconds - before.seconds,
            policies=self.policies,
            shadow_misses={k: n - before.shadow_misses[k] for k, n in self.shadow_misses.items()},
        )

    def __str__(self) -> str:
        return (
            f"experts from disk: {self.slots} of {self.experts} in memory, "
            f"{self.hit_rate:.0%} found there, {format_bytes(self.nbytes)} read"
            + (f" at {format_bytes(self.rate)}/s" if self.misses else "")
        )


class Streaming:
    """The streamed banks of a model."""

    def __init__(self, banks: Sequence[StreamedBank]) -> None:
        self.banks = tuple(banks)

    @staticmethod
    def of(weights: Iterable[object]) -> Streaming | None:
        """None if all of the weights are in memory."""
        banks = [weight for weight in weights if isinstance(weight, StreamedBank)]
        return Streaming(banks) if banks else None

    def stats(self) -> StreamStats:
        found: list[dict[str, Any]] = [bank.cache.stats() for bank in self.banks]
        phases = [stats[phase] for stats in found for phase in ("prefill", "decode")]
        decode = [stats["decode"] for stats in found]
        shadow: Counter[str] = Counter()
        for counts in phases:
            shadow.update(counts["shadow_misses"])
        readers = {id(bank.blobs.files): bank.blobs.files.reader for bank in self.banks}
        disk = [reader.stats() for reader in readers.values()]
        return StreamStats(
            experts=sum(bank.num_experts for bank in self.banks),
            slots=sum(bank.slots for bank in self.banks),
            hits=sum(counts["hits"] for counts in phases),
            misses=sum(counts["misses"] for counts in phases),
            decode_hits=sum(counts["hits"] for counts in decode),
            decode_misses=sum(counts["misses"] for counts in decode),
            nbytes=sum(counts["nbytes"] for counts in phases),
            seconds=sum(stats["busy_seconds"] for stats in disk),
            policies=dict(Counter(stats["policy"] for stats in found)),
            shadow_misses=dict(shadow),
        )

"""Runs one step of work: fills the batch buffers, replays the recorded forward pass.

The forward pass is recorded once, here, over buffers that never move. A step writes token ids,
positions, slots and page tables into them and replays: no Python runs per layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moestro.engine.config import EngineConfig
from moestro.engine.scheduler import Work
from moestro.models.spec import Model
from moestro.ops.contracts import Batch


class Runner:
    """Owns the KV cache, the activation buffers and the recorded program of one model."""

    def __init__(self, model: Model, config: EngineConfig, *, context: int, pages: int) -> None:
        self._table = Batch.allocate(
            tokens=config.max_batch_tokens,
            slots=config.max_sequences,
            pages_per_slot=-(-context // config.page_size),
            logits=config.max_sequences,
        )
        self._cache = model.allocate_cache(
            pages=pages, page_size=config.page_size, dtype=getattr(torch, config.kv_dtype)
        )
        self._buffers = model.allocate_buffers(
            tokens=config.max_batch_tokens, logits=config.max_sequences
        )
        with model.device.ops.record() as program:
            model.forward(self._table, self._cache, self._buffers)
        self._program = program

    def run(self, work: Sequence[Work]) -> Tensor:
        """Compute the work's keys and values, and the logits of those that ask for them.

        Returns float32 [items with logits, vocab_size] in the order of ``work``: a view that the
        next run overwrites.
        """
        rows = self._fill(work)
        self._program.replay()
        return self._buffers.logits[:rows]

    def _fill(self, work: Sequence[Work]) -> int:
        batch = self._table
        row = 0
        logit_rows: list[int] = []
        for item in work:
            sequence, stop = item.sequence, item.start + item.count
            rows = slice(row, row + item.count)
            batch.token_ids[rows] = _int32(sequence.tokens[item.start : stop])
            batch.positions[rows] = torch.arange(item.start, stop, dtype=torch.int32)
            batch.slots[rows] = sequence.slot
            batch.page_table[sequence.slot, : len(sequence.pages)] = _int32(sequence.pages)
            row += item.count
            if item.logits:
                logit_rows.append(row - 1)
        batch.logit_rows[: len(logit_rows)] = _int32(logit_rows)
        batch.counts[0], batch.counts[1] = row, len(logit_rows)
        return len(logit_rows)


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)

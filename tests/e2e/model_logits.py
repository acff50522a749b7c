"""Logits of a whole checkpoint through Moestro, without the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moestro import devices, models
from moestro.checkpoints import open_checkpoint
from moestro.memory.loader import load_weights
from moestro.memory.policy import FormatPolicy
from moestro.models import Model
from moestro.ops.contracts import Batch

PAGE = 32


def load(path: Path, *, device: str, formats: str = "") -> Model:
    """The model of a checkpoint; ``formats`` as for ``moestro.LLM``."""
    checkpoint = open_checkpoint(path)
    try:
        description = models.describe(checkpoint)
        policy = FormatPolicy.parse(formats)
        weights = load_weights(checkpoint, description.weights, policy=policy)
    finally:
        checkpoint.close()
    return models.build(description, weights, devices.get(device), max_positions=512)


def sequence_logits(
    model: Model, ids: Sequence[int], kv_dtype: torch.dtype = torch.float32
) -> Tensor:
    """float32 [len(ids), vocab_size]: one sequence in one prefill."""
    count = len(ids)
    pages = -(-count // PAGE)
    batch = Batch.allocate(tokens=count, slots=1, pages_per_slot=pages, logits=count)
    positions = torch.arange(count, dtype=torch.int32)
    batch.counts[:] = count
    batch.token_ids[:] = torch.tensor(ids, dtype=torch.int32)
    batch.positions[:] = positions
    batch.logit_rows[:] = positions
    batch.page_table[0] = torch.arange(pages, dtype=torch.int32)
    cache = model.allocate_cache(pages=pages, page_size=PAGE, dtype=kv_dtype)
    buffers = model.allocate_buffers(tokens=count, logits=count)
    model.forward(batch, cache, buffers)
    return buffers.logits.clone()

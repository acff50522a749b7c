"""All activation memory of a model: allocated once for a capacity, written by ops, never grown.

A block names what it needs as ``Scratch`` and finds it again under the same Scratch. Equal Scratch
is one tensor: layers share it, so nothing in it outlives the block that wrote it, and two tensors
that are live at once must differ in name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scratch:
    """A [tokens, width] buffer. ``fill`` is its content at first; constants are never written."""

    name: str
    width: int
    dtype: torch.dtype = torch.float32
    fill: int = 0


class Buffers:
    """Every activation buffer of one model for up to ``tokens`` tokens and ``logits`` logit rows.

    logit_hidden: float32 [logits, hidden_size], the rows that get logits. logits: float32
    [logits, vocab_size].
    """

    def __init__(
        self,
        scratch: Iterable[Scratch],
        *,
        tokens: int,
        logits: int,
        hidden_size: int,
        vocab_size: int,
    ) -> None:
        self.tokens = tokens
        self._scratch = {
            s: torch.full((tokens, s.width), s.fill, dtype=s.dtype) for s in dict.fromkeys(scratch)
        }
        self.logit_hidden = torch.zeros(logits, hidden_size)
        self.logits = torch.zeros(logits, vocab_size)

    def __getitem__(self, scratch: Scratch) -> Tensor:
        return self._scratch[scratch]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        every = [*self._scratch.values(), self.logit_hidden, self.logits]
        return sum(t.numel() * t.element_size() for t in every)

"""What ops work on: packed weights, tables of experts, caches, batches.

Shape letters: T token capacity of a batch, H hidden_size, N output channels, K input channels,
E experts, I intermediate_size, S sequence slots, P pages per sequence, L logit rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Packed(Protocol):
    """A packed weight matrix [N, K] (see ``formats.base.PackedWeight``)."""

    @property
    def format_name(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def data(self) -> Tensor: ...
    @property
    def input_order(self) -> Tensor | None:
        """int32 [K] if the columns of ``data`` are not in the order of the input: column j of them
        meets input channel ``input_order[j]``.
        """
        ...

    def unpack(self) -> Tensor:
        """Decoded float32 weights [N, K], columns in the order of the input."""
        ...


class ExpertTable(Protocol):
    """All experts of one layer as packed blobs (see ``memory.expert_bank.ExpertBank``).

    ``pointers`` is int64 [E]: the address of each expert's blob ``gate | up | down``.
    ``projections`` has for each of the three its format name, rows, cols and offset in the blob.

    A table whose experts are not all in memory has an attribute ``cache`` besides, the native cache
    that reads them (``memory.streamed_bank``), and its pointers are zero.
    """

    @property
    def pointers(self) -> Tensor: ...
    @property
    def projections(self) -> Sequence[Projection]: ...
    @property
    def activation(self) -> str:
        """One of ``ACTIVATIONS``."""
        ...

    @property
    def biases(self) -> ExpertBiases | None: ...
    @property
    def input_orders(self) -> Tensor | None:
        """int32 [E, H]: of each expert's gate and up, see ``Packed.input_order``."""
        ...

    def expert(self, index: int) -> tuple[Packed, Packed, Packed]:
        """(gate, up, down) of one expert, for the reference."""
        ...


#: What an expert makes of gate and up. silu, gelu (with the exact normal distribution), gelu_tanh,
#: relu: act(gate) * up (arXiv:2002.05202). swiglu_oai: g * sigmoid(1.702 g) * (u + 1) with
#: g = min(gate, 7) and u = up clamped to -7..7.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai")


#: How a router scores experts: softmax over all of them, or each one's sigmoid alone.
SCORINGS = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class ExpertBiases:
    """What is added to each expert's products: gate, up float32 [E, I], down float32 [E, H]."""

    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, kw_only=True)
class SharedExperts:
    """Experts beside the routed ones, of any other shape and format: ids int32 and weights float32
    [T, n] say which of ``experts`` each token passes (usually the only one, with weight one).
    """

    experts: ExpertTable
    ids: Tensor
    weights: Tensor


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Where one of gate, up or down lies in an expert's blob."""

    format_name: str
    rows: int
    cols: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class KvLayer:
    """One layer's paged key/value cache for grouped-query attention.

    k: [pages, kv_heads, page_size // 16, head_dim, 16]  sixteen keys side by side, one vector lane
    each. v: [pages, kv_heads, page_size, head_dim]. dtype float32, float16 or bfloat16; page_size
    is a multiple of 16. Fresh caches are zero.

    A cache of signed bytes holds uint8 codes, value = scale * (code - 128), with head_dim a
    multiple of 16. k: [pages, kv_heads, page_size // 16, head_dim // 4, 16, 4], key p and channel c
    at [.., p // 16, c // 4, p % 16, c % 4]. v: [pages, kv_heads, page_size // 4, head_dim, 4].
    k_scale: bfloat16 [pages, kv_heads, page_size // 16, ceil(head_dim / 32), 16], one scale per key
    and 32 channels. v_scale: bfloat16 [pages, kv_heads, page_size]. A scale is amax / 127 rounded
    up, so a stored element is off by at most amax / 252; a group with NaN or infinity reads as NaN.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def is_codes(self) -> bool:
        """Whether it holds signed bytes with scales."""
        return self.v.dtype == torch.uint8

    @property
    def pages(self) -> int:
        return self.v.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.v.shape[1]

    @property
    def page_size(self) -> int:
        return self.v.shape[2] * (4 if self.is_codes else 1)

    @property
    def head_dim(self) -> int:
        return self.v.shape[3]


@dataclass(frozen=True, kw_only=True)
class LatentKvLayer:
    """One layer's paged cache for multi-head latent attention (arXiv:2405.04434).

    rows: [pages, page_size, rank + rope_dim], per position the ``rank`` compressed channels that
    are key and value of all heads, then the rotated key channels that all heads share. dtype and
    page_size as in KvLayer. Fresh caches are zero.
    """

    rows: Tensor
    rank: int

    @property
    def pages(self) -> int:
        return self.rows.shape[0]

    @property
    def page_size(self) -> int:
        return self.rows.shape[1]

    @property
    def width(self) -> int:
        """rank + rope_dim"""
        return self.rows.shape[2]


#: What an attention block caches of one layer.
LayerCache = KvLayer | LatentKvLayer


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Fixed buffers (all int32) that describe one ragged step.

    counts [2]: live tokens, live logit rows. token_ids [T]; positions [T]; slots [T], the sequence
    slot of each token: tokens of one sequence are contiguous and ascending in position.
    page_table [S, P]: page of each slot's positions ``p // page_size``. logit_rows [L]: which token
    rows get logits.
    """

    counts: Tensor
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    page_table: Tensor
    logit_rows: Tensor

    @property
    def rows(self) -> Tensor:
        """Live token count, int32 [1]."""
        return self.counts[0:1]

    @property
    def logit_count(self) -> Tensor:
        """Live logit row count, int32 [1]."""
        return self.counts[1:2]

    @property
    def capacity(self) -> int:
        return self.token_ids.shape[0]

    @staticmethod
    def allocate(*, tokens: int, slots: int, pages_per_slot: int, logits: int) -> Batch:
        def buffer(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32)

        return Batch(
            counts=buffer(2),
            token_ids=buffer(tokens),
            positions=buffer(tokens),
            slots=buffer(tokens),
            page_table=buffer(slots, pages_per_slot),
            logit_rows=buffer(logits),
        )

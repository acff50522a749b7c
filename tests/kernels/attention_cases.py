"""Sequences in a paged cache, and attention over them: what the attention tests share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from moestro import native
from moestro.devices.cpu.ops import CpuOps
from moestro.nn.kv_cache import allocate_kv
from moestro.ops.contracts import Batch, KvLayer
from moestro.ops.reference import ReferenceOps

OPS = CpuOps()
ORACLE = ReferenceOps(torch.float64)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: (slot, first position, end position) runs
Parts = Sequence[tuple[int, int, int]]
#: over bfloat16 caches these multiply bfloat16 pairs: queries and probabilities are rounded too
PAIR_ISAS = frozenset({"avx512_bf16", "amx"})


def unwritten_cache(
    *, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> KvLayer:
    """A cache whose places are NaN (those of codes by their scales)."""
    cache = allocate_kv(
        pages=pages, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype
    )
    if cache.k_scale is None or cache.v_scale is None:
        cache.k.fill_(torch.nan)
        cache.v.fill_(torch.nan)
    else:
        for codes, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
            codes.random_(0, 256)
            scale.fill_(torch.nan)
    return cache


class PagedSequences:
    """Sequences of the given lengths in a shuffled page pool, and batches of their tokens."""

    def __init__(self, lengths: Sequence[int], page_size: int, random: torch.Generator) -> None:
        self.lengths = lengths
        self.pages_per_slot = max(-(-n // page_size) for n in lengths)
        self.pages = self.pages_per_slot * len(lengths)
        self.page_table = torch.randperm(self.pages, generator=random).int().view(len(lengths), -1)
        self.first_row = [0, *itertools.accumulate(lengths)]

    def batch(self, parts: Parts) -> tuple[Batch, list[int]]:
        """A batch of (slot, first position, end position) runs, and their rows, counted over
        all sequences."""
        rows = [self.first_row[slot] + p for slot, first, end in parts for p in range(first, end)]
        batch = Batch.allocate(
            tokens=len(rows),
            slots=len(self.lengths),
            pages_per_slot=self.pages_per_slot,
            logits=1,
        )
        batch.counts[0] = len(rows)
        batch.page_table.copy_(self.page_table)
        batch.positions.copy_(torch.tensor([p for _, a, b in parts for p in range(a, b)]).int())
        batch.slots.copy_(torch.tensor([s for s, a, b in parts for _ in range(a, b)]).int())
        return batch, rows

    def whole(self) -> list[tuple[int, int, int]]:
        return [(slot, 0, n) for slot, n in enumerate(self.lengths)]


class Case(PagedSequences):
    """Sequences in a cache whose unwritten places are NaN."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 32,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        window: int = 0,
        softcap: float = 0.0,
        sinks: float | None = None,
    ) -> None:
        random = torch.Generator().manual_seed(sum(lengths) + head_dim)
        super().__init__(lengths, page_size, random)
        self.heads, self.head_dim, self.window, self.softcap = heads, head_dim, window, softcap
        self.cache = unwritten_cache(
            pages=self.pages, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim,
            dtype=dtype,
        )  # fmt: skip
        tokens, width = sum(lengths), kv_heads * head_dim
        self.k = torch.randn(tokens, width, generator=random)
        self.v = torch.randn(tokens, width, generator=random)
        self.q = torch.randn(min(tokens, 512), heads * head_dim, generator=random) * 2
        self.sinks = None if sinks is None else sinks + torch.randn(heads, generator=random)

    def queries(self, rows: Sequence[int]) -> Tensor:
        return self.q[[row % len(self.q) for row in rows]]

    def write(self) -> None:
        batch, rows = self.batch(self.whole())
        OPS.write_kv(self.k[rows], self.v[rows], self.cache, batch)

    def attend(
        self,
        parts: Parts | None = None,
        ops: CpuOps | ReferenceOps = OPS,
        q: Tensor | None = None,
    ) -> Tensor:
        batch, rows = self.batch(parts or self.whole())
        q = self.queries(rows) if q is None else q
        out = torch.full_like(q, torch.nan)
        ops.attention(
            q,
            self.cache,
            out,
            batch,
            heads=self.heads,
            scale=self.head_dim**-0.5,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
        )
        return out

    def check(self, parts: Sequence[tuple[int, int, int]], atol: float = 5e-6) -> Tensor:
        """Every instruction set against the oracle; returns the bits that they share.

        Probabilities sum to one: the error is that of a few hundred float32 roundings of values.
        """
        oracle = self.attend(parts, ORACLE)
        results = {}
        for isa in native.supported_isas():
            native.set_isa(isa)
            results[isa] = self.attend(parts)
        pairs = PAIR_ISAS if self.takes_pairs else frozenset()
        shared = results[native.supported_isas()[0]]
        for isa, result in results.items():
            if isa not in pairs:
                assert torch.equal(shared, result), isa
        torch.testing.assert_close(shared, oracle, rtol=1e-5, atol=atol)
        rounded = [result for isa, result in results.items() if isa in pairs]
        for result in rounded:
            assert torch.equal(rounded[0], result)
        if rounded:
            self.check_pairs(parts, rounded[0])
        return shared

    @property
    def takes_pairs(self) -> bool:
        return self.cache.k.dtype == torch.bfloat16 and self.head_dim % 16 == 0

    def check_pairs(self, parts: Sequence[tuple[int, int, int]], got: Tensor) -> None:
        """Against an oracle with rounded queries: what is left is the rounding of probabilities to
        2^-9 of each, in the products and in what they are divided by.
        """
        scale = self.head_dim**-0.5
        rows = self.batch(parts)[1]
        q = (self.queries(rows) * scale).bfloat16().float() / scale
        error = (got - self.attend(parts, ORACLE, q)).abs()
        largest = self.v.abs().max()
        assert error.max() <= 2**-8 * largest
        assert error.square().mean().sqrt() <= 2**-11 * largest


SHAPES = [
    {"heads": 1, "kv_heads": 1, "head_dim": 1},
    {"heads": 3, "kv_heads": 3, "head_dim": 16},
    {"heads": 9, "kv_heads": 3, "head_dim": 64},
    {"heads": 14, "kv_heads": 2, "head_dim": 33, "page_size": 48},
    {"heads": 16, "kv_heads": 2, "head_dim": 128, "page_size": 64},
    {"heads": 26, "kv_heads": 2, "head_dim": 80, "page_size": 32},
    {"heads": 100, "kv_heads": 1, "head_dim": 24},  # more heads than share one walk
    {"heads": 4, "kv_heads": 2, "head_dim": 256, "page_size": 128},
]

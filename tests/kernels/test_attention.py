"""Paged attention: against the float64 reference, and the same bits whatever a row runs beside."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moestro import native
from moestro.core.errors import InvalidRequest, UnsupportedOp
from moestro.devices.cpu.ops import CpuOps
from moestro.ops.contracts import Batch, KvLayer
from moestro.ops.reference import ReferenceOps

OPS = CpuOps()
ORACLE = ReferenceOps(torch.float64)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def restore_native() -> Iterator[None]:
    isa, threads = native.isa(), native.threads()
    yield
    native.set_isa(isa)
    native.set_threads(threads)


class Case:
    """Sequences of the given lengths in a shuffled page pool whose unwritten places are NaN."""

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
        sinks: float | None = None,
    ) -> None:
        self.lengths, self.heads, self.head_dim, self.window = lengths, heads, head_dim, window
        random = torch.Generator().manual_seed(sum(lengths) + head_dim)
        self.pages_per_slot = max(-(-n // page_size) for n in lengths)
        pages = self.pages_per_slot * len(lengths)
        self.page_table = torch.randperm(pages, generator=random).int().view(len(lengths), -1)
        keys = (pages, kv_heads, page_size // 16, head_dim, 16)
        values = (pages, kv_heads, page_size, head_dim)
        self.cache = KvLayer(
            k=torch.full(keys, torch.nan, dtype=dtype), v=torch.full(values, torch.nan, dtype=dtype)
        )
        tokens, width = sum(lengths), kv_heads * head_dim
        self.k = torch.randn(tokens, width, generator=random)
        self.v = torch.randn(tokens, width, generator=random)
        self.q = torch.randn(min(tokens, 512), heads * head_dim, generator=random) * 2
        self.first_row = [0, *itertools.accumulate(lengths)]
        self.sinks = None if sinks is None else sinks + torch.randn(heads, generator=random)

    def batch(self, parts: Sequence[tuple[int, int, int]]) -> tuple[Batch, list[int]]:
        """A batch of (slot, first position, end position) runs, and the rows of q, k, v in it."""
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

    def queries(self, rows: Sequence[int]) -> Tensor:
        return self.q[[row % len(self.q) for row in rows]]

    def write(self) -> None:
        batch, rows = self.batch(self.whole())
        OPS.write_kv(self.k[rows], self.v[rows], self.cache, batch)

    def attend(
        self,
        parts: Sequence[tuple[int, int, int]] | None = None,
        ops: CpuOps | ReferenceOps = OPS,
    ) -> Tensor:
        batch, rows = self.batch(parts or self.whole())
        q = self.queries(rows)
        out = torch.full_like(q, torch.nan)
        ops.attention(
            q,
            self.cache,
            out,
            batch,
            heads=self.heads,
            scale=self.head_dim**-0.5,
            window=self.window,
            sinks=self.sinks,
        )
        return out


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [0, 1, 50, 600])
def test_against_the_reference_and_every_isa(
    shape: dict[str, int], dtype: torch.dtype, window: int
):
    case = Case([1, 19, 590, 66], dtype=dtype, window=window, **shape)
    case.write()
    # A few tokens deep in a sequence that crosses the edge of a segment, beside whole ones.
    parts = [(0, 0, 1), (2, 505, 530), (1, 0, 19), (3, 65, 66), (2, 589, 590)]
    oracle = case.attend(parts, ORACLE)
    results = []
    for isa in native.supported_isas():
        native.set_isa(isa)
        results.append(case.attend(parts))
        assert torch.equal(results[0], results[-1]), isa
    # Probabilities sum to one: the error is that of a few hundred float32 roundings of values.
    torch.testing.assert_close(results[0], oracle, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("sinks", [-torch.inf, -1e30, -20.0, 0.0, 4.0, 80.0, 1e30])
@pytest.mark.parametrize("window", [0, 1, 50])
def test_sinks_against_the_reference_and_every_isa(sinks: float, window: int):
    for shape in (SHAPES[2], SHAPES[3], SHAPES[6]):
        case = Case([1, 1, 590], window=window, sinks=sinks, **shape)
        case.write()
        parts = [(2, 0, 3), (0, 0, 1), (2, 505, 530), (1, 0, 1), (2, 589, 590)]
        oracle = case.attend(parts, ORACLE)
        results = []
        for isa in native.supported_isas():
            native.set_isa(isa)
            results.append(case.attend(parts))
            assert torch.equal(results[0], results[-1]), isa
        torch.testing.assert_close(results[0], oracle, rtol=1e-5, atol=5e-6)
        if sinks < -1e20:  # nothing is taken, to the last bit
            case.sinks = None
            assert torch.equal(case.attend(parts), results[0])
        if sinks > 1e20:
            assert not results[0].any()


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("window", [0, 700])
def test_bits_with_sinks_do_not_depend_on_batch_chunks_or_threads(threads: int, window: int):
    case = Case([1300, 530], heads=6, kv_heads=2, head_dim=20, window=window, sinks=2.0)
    case.write()
    native.set_threads(1)
    whole = case.attend()
    native.set_threads(threads)
    assert torch.equal(case.attend(), whole)
    for first, end in itertools.pairwise([0, 1, 97, 513, 1299, 1300]):
        assert torch.equal(case.attend([(0, first, end)]), whole[first:end]), (first, end)
    assert torch.equal(case.attend([(1, 529, 530), (0, 1299, 1300)]), whole[[1829, 1299]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_equals_the_reference_bit_by_bit(dtype: torch.dtype):
    case = Case([70, 5], kv_heads=3, heads=3, head_dim=37, page_size=32, dtype=dtype)
    for isa in native.supported_isas():
        native.set_isa(isa)
        case.cache.k.fill_(7)
        case.cache.v.fill_(7)
        case.write()
        k, v = case.cache.k.clone(), case.cache.v.clone()
        case.cache.k.fill_(7)
        case.cache.v.fill_(7)
        batch, rows = case.batch(case.whole())
        ORACLE.write_kv(case.k[rows], case.v[rows], case.cache, batch)
        assert torch.equal(k, case.cache.k)
        assert torch.equal(v, case.cache.v)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("heads", [2, 6, 34])
@pytest.mark.parametrize("window", [0, 700])
def test_bits_do_not_depend_on_batch_chunks_or_threads(threads: int, heads: int, window: int):
    case = Case([1300, 530], heads=heads, kv_heads=2, head_dim=20, window=window)
    case.write()
    native.set_threads(1)
    whole = case.attend()
    native.set_threads(threads)
    assert torch.equal(case.attend(), whole)
    # In chunks of odd sizes, the last ones alone (long context, few tokens: split over segments).
    chunks = [0, 1, 97, 512, 513, 1000, 1299, 1300]
    for first, end in itertools.pairwise(chunks):
        assert torch.equal(case.attend([(0, first, end)]), whole[first:end]), (first, end)
    # Decode of both sequences in one step, in either order.
    rows = whole[[1299, 1829]]
    assert torch.equal(case.attend([(0, 1299, 1300), (1, 529, 530)]), rows)
    assert torch.equal(case.attend([(1, 529, 530), (0, 1299, 1300)]), rows.flip(0))


def test_more_parts_than_the_shared_memory_holds():
    """Thirty blocks of two tokens, all worth splitting, whose parts take 17.8 MB: some are not."""
    case = Case([3000], heads=48, kv_heads=1, head_dim=256, dtype=torch.bfloat16)
    case.write()
    native.set_threads(1)
    alone = case.attend([(0, 2940, 3000)])
    native.set_threads(8)
    assert torch.equal(case.attend([(0, 2940, 3000)]), alone)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    shape=st.sampled_from(SHAPES[:4]),
    window=st.sampled_from([0, 1, 7, 40, 64]),
    data=st.data(),
)
def test_random_ragged_batches(lengths, shape, window, data):
    case = Case(lengths, window=window, **shape)
    case.write()
    parts = []
    for slot in data.draw(st.permutations(range(len(lengths)))):
        first = data.draw(st.integers(0, lengths[slot] - 1))
        parts.append((slot, first, data.draw(st.integers(first + 1, lengths[slot]))))
    torch.testing.assert_close(case.attend(parts), case.attend(parts, ORACLE), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("window", [0, 20])
def test_what_a_token_does_not_see_cannot_reach_it(poison: float, window: int):
    """Unwritten places (NaN in every case here), later tokens, and keys before the window."""
    case = Case([100], heads=6, kv_heads=2, head_dim=24, window=window)
    case.write()
    clean = case.attend()
    case.k[60] = poison
    case.v[60] = poison
    case.write()
    poisoned = case.attend()
    assert torch.equal(poisoned[:60], clean[:60])
    blind_from = 80 if window else 100
    assert poisoned[60:blind_from].isnan().all()
    assert torch.equal(poisoned[blind_from:], clean[blind_from:])


def test_a_query_of_nan_spoils_only_its_own_row():
    case = Case([40], heads=4, kv_heads=1)
    case.write()
    clean = case.attend()
    case.q[20] = torch.nan
    spoiled = case.attend()
    assert spoiled[20].isnan().all()
    keep = [i for i in range(40) if i != 20]
    assert torch.equal(spoiled[keep], clean[keep])


def test_large_scores_do_not_overflow():
    case = Case([600], heads=2, kv_heads=1, head_dim=8)
    case.q *= 1e4
    case.write()
    torch.testing.assert_close(case.attend(), case.attend(ops=ORACLE), rtol=1e-3, atol=1e-2)
    assert case.attend().isfinite().all()


@pytest.mark.parametrize("op", ["write_kv", "attention"])
@pytest.mark.parametrize(
    ("what", "index", "value", "message"),
    [
        ("slots", (0,), -1, r"slot -1 of row 0 is outside 0\.\.1"),
        ("slots", (3,), 2, r"slot 2 of row 3 is outside 0\.\.1"),
        ("positions", (0,), -1, r"position -1 of row 0 is outside 0\.\.47"),
        ("positions", (3,), 48, r"position 48 of row 3 is outside 0\.\.47"),
        ("positions", (2,), 9, r"position 9 of row 2 does not follow position 31"),
        ("page_table", (0, 1), -1, r"page -1 of row 0 is outside 0\.\.5"),
        ("page_table", (1, 0), 6, r"page 6 of row 3 is outside 0\.\.5"),
    ],
)
def test_bad_batches_are_refused_before_any_access(
    op: str, what: str, index: tuple[int, ...], value: int, message: str
):
    case = Case([48, 20])
    case.write()
    batch, rows = case.batch([(0, 30, 33), (1, 14, 16)])
    getattr(batch, what)[index] = value
    keys, out = case.cache.k.clone(), torch.full_like(case.queries(rows), 7.0)
    native.set_threads(2)
    with pytest.raises(InvalidRequest, match=f"{op}: {message}"):
        if op == "write_kv":
            OPS.write_kv(case.k[rows] + 1, case.v[rows], case.cache, batch)
        else:
            OPS.attention(case.queries(rows), case.cache, out, batch, heads=4, scale=1.0)
    assert torch.equal(keys.nan_to_num(), case.cache.k.nan_to_num())
    assert (out == 7).all()


def test_shapes_are_checked():
    case = Case([20])
    batch, rows = case.batch([(0, 0, 20)])
    q, out = case.queries(rows), torch.empty_like(case.queries(rows))
    with pytest.raises(UnsupportedOp, match="3 heads do not share 2 kv heads"):
        OPS.attention(q, case.cache, out, batch, heads=3, scale=1.0)
    with pytest.raises(InvalidRequest, match="q width is 128, expected 256"):
        OPS.attention(q, case.cache, out, batch, heads=8, scale=1.0)
    with pytest.raises(InvalidRequest, match="window -1 is negative"):
        OPS.attention(q, case.cache, out, batch, heads=4, scale=1.0, window=-1)
    with pytest.raises(InvalidRequest, match="sinks is 3, expected 4"):
        OPS.attention(q, case.cache, out, batch, heads=4, scale=1.0, sinks=torch.zeros(3))
    halves = KvLayer(k=case.cache.k.half(), v=case.cache.v)
    with pytest.raises(InvalidRequest, match=r"cache\.k and cache\.v differ in dtype"):
        OPS.attention(q, halves, out, batch, heads=4, scale=1.0)
    doubles = KvLayer(k=case.cache.k.double(), v=case.cache.v.double())
    with pytest.raises(UnsupportedOp, match="float32, float16 or bfloat16"):
        OPS.attention(q, doubles, out, batch, heads=4, scale=1.0)
    with pytest.raises(InvalidRequest, match=r"cache\.k has size 31 in dimension 3, expected 32"):
        narrow = case.cache.k[:, :, :, :31].contiguous()
        OPS.attention(q, KvLayer(k=narrow, v=case.cache.v), out, batch, heads=4, scale=1.0)
    wide = Case([4], head_dim=257)
    batch, rows = wide.batch([(0, 0, 4)])
    with pytest.raises(UnsupportedOp, match=r"head_dim 257 is outside 1\.\.256"):
        OPS.write_kv(wide.k, wide.v, wide.cache, batch)

"""Multi-head latent attention: against the float64 reference and against formed keys and values,
and the same bits whatever a row runs beside.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import packed_cases
import pytest
import torch
from attention_cases import DTYPES, OPS, ORACLE, PagedSequences, Parts
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moestro import native
from moestro.core.errors import InvalidRequest, UnsupportedOp
from moestro.devices.cpu.ops import CpuOps
from moestro.formats.base import PackedWeight
from moestro.nn.kv_cache import allocate_latent
from moestro.ops.reference import ReferenceOps


class Case(PagedSequences):
    """Sequences in a cache whose unwritten places are NaN."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        heads: int = 4,
        rank: int = 32,
        rope: int = 16,
        nope: int = 8,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        random = torch.Generator().manual_seed(sum(lengths) + heads)
        super().__init__(lengths, page_size, random)
        self.heads, self.rank, self.rope, self.nope = heads, rank, rope, nope
        self.cache = allocate_latent(
            pages=self.pages, page_size=page_size, rank=rank, rope_dim=rope, dtype=dtype
        )
        self.cache.rows.fill_(torch.nan)
        tokens = sum(lengths)
        self.kv = torch.randn(tokens, rank + rope, generator=random)
        self.q = torch.randn(min(tokens, 512), heads * (nope + rope), generator=random) * 2
        self.absorbed = torch.randn(min(tokens, 512), heads * rank, generator=random) * 2
        self.norm = torch.rand(rank, generator=random) + 0.5
        angles = torch.rand(max(lengths), rope // 2, generator=random) * 6
        self.cos, self.sin = angles.cos(), angles.sin()
        # Scores of deviation 2: as queries of that size have over keys of any width.
        self.scale = (rank + rope) ** -0.5

    def write(self, ops: CpuOps | ReferenceOps = OPS, *, interleaved: bool = True) -> None:
        batch, rows = self.batch(self.whole())
        ops.write_latent(
            self.kv[rows], self.norm, self.cos, self.sin, self.cache, batch, eps=1e-6,
            interleaved=interleaved,
        )  # fmt: skip

    def attend(self, parts: Parts | None = None, ops: CpuOps | ReferenceOps = OPS) -> Tensor:
        batch, rows = self.batch(parts or self.whole())
        index = [row % len(self.q) for row in rows]
        out = torch.full((len(rows), self.heads * self.rank), torch.nan)
        ops.latent_attention(
            self.q[index], self.absorbed[index], self.cache, out, batch, heads=self.heads,
            scale=self.scale,
        )  # fmt: skip
        return out


SHAPES = [
    {"heads": 1, "rank": 1, "rope": 2},
    {"heads": 3, "rank": 20, "rope": 6, "page_size": 48},
    {"heads": 16, "rank": 64, "rope": 16, "page_size": 32},
    {"heads": 20, "rank": 100, "rope": 32},  # more heads than lanes
    {"heads": 18, "rank": 512, "rope": 128, "page_size": 64},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_the_reference_and_every_isa(shape: dict[str, int], dtype: torch.dtype):
    case = Case([1, 19, 590, 66], dtype=dtype, **shape)
    case.write()
    # A few tokens deep in a sequence that crosses the edge of a segment, beside whole ones.
    parts = [(0, 0, 1), (2, 506, 515), (1, 0, 7), (3, 65, 66), (2, 589, 590)]
    oracle = case.attend(parts, ORACLE)
    results = []
    for isa in native.supported_isas():
        native.set_isa(isa)
        results.append(case.attend(parts))
        assert torch.equal(results[0], results[-1]), isa
    # A score is a chain of up to 640 float32 roundings.
    torch.testing.assert_close(results[0], oracle, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_rows_are_the_references(dtype: torch.dtype, interleaved: bool):
    case = Case([70, 5], rank=37, rope=6, page_size=32, dtype=dtype)
    stored = []
    for isa in native.supported_isas():
        native.set_isa(isa)
        case.cache.rows.fill_(7)
        case.write(interleaved=interleaved)
        stored.append(case.cache.rows.clone())
        assert torch.equal(stored[0], stored[-1]), isa
    case.cache.rows.fill_(7)
    case.write(ORACLE, interleaved=interleaved)
    step = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    torch.testing.assert_close(stored[0], case.cache.rows, rtol=step, atol=1e-6)
    untouched = case.cache.rows == 7
    assert torch.equal(stored[0] == 7, untouched) and untouched.any()


@pytest.mark.parametrize("threads", [1, 2, 5, 48])
@pytest.mark.parametrize("heads", [3, 34])
def test_bits_do_not_depend_on_batch_chunks_or_threads(threads: int, heads: int):
    case = Case([1300, 530], heads=heads, rank=24, rope=8)
    case.write()
    native.set_threads(1)
    whole = case.attend()
    native.set_threads(threads)
    assert torch.equal(case.attend(), whole)
    # In chunks of odd sizes, the last ones alone (long context, few tokens: split over segments).
    for first, end in itertools.pairwise([0, 1, 97, 512, 513, 1000, 1293, 1299, 1300]):
        assert torch.equal(case.attend([(0, first, end)]), whole[first:end]), (first, end)
    rows = whole[[1299, 1829]]
    assert torch.equal(case.attend([(0, 1299, 1300), (1, 529, 530)]), rows)
    assert torch.equal(case.attend([(1, 529, 530), (0, 1299, 1300)]), rows.flip(0))


def test_more_segments_than_the_shared_memory_holds():
    """One token of 176 heads over 48 segments: 528 parts of 33 KB are 17 MB beside their sums, so
    the last ones come in a second wave.
    """
    case = Case([24000], heads=176, rank=512, rope=2, dtype=torch.bfloat16, page_size=64)
    case.cache.rows.copy_(torch.randn(case.cache.rows.shape, dtype=torch.bfloat16))
    native.set_threads(1)
    alone = case.attend([(0, 23999, 24000)])
    native.set_threads(8)
    assert torch.equal(case.attend([(0, 23999, 24000)]), alone)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    shape=st.sampled_from(SHAPES[:4]),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_random_ragged_batches(lengths, shape, threads, data):
    case = Case(lengths, **shape)
    case.write()
    native.set_threads(threads)
    parts = []
    for slot in data.draw(st.permutations(range(len(lengths)))):
        first = data.draw(st.integers(0, lengths[slot] - 1))
        parts.append((slot, first, data.draw(st.integers(first + 1, lengths[slot]))))
    torch.testing.assert_close(case.attend(parts), case.attend(parts, ORACLE), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_a_token_does_not_see_cannot_reach_it(poison: float):
    """Unwritten places (NaN in every case here) and later tokens."""
    case = Case([100], heads=6)
    case.write()
    clean = case.attend()
    case.kv[60] = poison
    case.write()
    poisoned = case.attend()
    assert torch.equal(poisoned[:60], clean[:60])
    assert poisoned[60:].isnan().any(1).all()


def test_a_query_of_nan_spoils_only_its_own_head():
    case = Case([40], heads=4)
    case.write()
    clean = case.attend()
    case.absorbed[20, : case.rank] = torch.nan
    spoiled = case.attend()
    assert spoiled[20, : case.rank].isnan().all()
    spoiled[20, : case.rank] = clean[20, : case.rank]
    assert torch.equal(spoiled, clean)


def test_large_scores_do_not_overflow():
    case = Case([600], heads=2, rank=8, rope=2)
    case.q *= 1e4
    case.absorbed *= 1e4
    case.write()
    got = case.attend()
    assert got.isfinite().all()
    torch.testing.assert_close(got, case.attend(ops=ORACLE), rtol=1e-3, atol=1e-2)


def test_absorbed_is_the_same_as_formed_keys_and_values():
    """Against attention over keys and values of every head, in the paper's notation."""
    heads, rank, rope, nope, value = 3, 32, 6, 10, 16
    case = Case([40], heads=heads, rank=rank, rope=rope, nope=nope)
    case.write()
    up = torch.randn(heads, nope + value, rank, generator=torch.Generator().manual_seed(1)) / 4
    q = case.q.view(-1, heads, nope + rope)
    case.absorbed = torch.einsum("thn,hnr->thr", q[..., :nope], up[:, :nope]).flatten(1)
    mixed = case.attend().view(-1, heads, rank)
    got = torch.einsum("thr,hvr->thv", mixed, up[:, nope:])
    pages = case.page_table[0].long()
    rows = case.cache.rows[pages].flatten(0, 1)[:40]
    formed = torch.einsum("cr,hdr->chd", rows[:, :rank], up)
    shared = rows[:, None, rank:].expand(-1, heads, -1)
    keys = torch.cat([formed[..., :nope], shared], dim=-1)
    scores = torch.einsum("thd,chd->htc", q, keys) * case.scale
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    want = torch.einsum("htc,chv->thv", probs, formed[..., nope:])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 31, 33, 70])
@pytest.mark.parametrize("name", ["f32", "bf16", "int8-g32", "int4-g32", "k6"])
def test_linear_heads_is_a_linear_per_head(name: str, tokens: int, threads: int):
    heads, channels, inputs, width = 3, 48, 40, 52
    weight = packed_cases.random_weight(name, heads * channels, inputs)
    x = torch.randn(tokens, heads * width, generator=torch.Generator().manual_seed(tokens))
    step = weight.format.nbytes(channels, inputs)

    def alone(head: int) -> Tensor:
        data = weight.data[head * step :][:step]
        one = PackedWeight(weight.format, channels, inputs, data)
        return packed_cases.linear(one, x[:, head * width :][:, :inputs].contiguous())

    out, oracle = (torch.zeros(tokens, heads * channels) for _ in range(2))
    for isa in native.supported_isas():
        with packed_cases.running(isa, threads):
            OPS.linear_heads(x, weight, out, packed_cases.rows_of(tokens), heads=heads)
            assert torch.equal(out, torch.cat([alone(h) for h in range(heads)], dim=1)), isa
    ORACLE.linear_heads(x, weight, oracle, packed_cases.rows_of(tokens), heads=heads)
    # Kernels of integer formats round x to 8 bits, those of bfloat16 may to its own.
    torch.testing.assert_close(out, oracle, rtol=0, atol=1e-4 if name == "f32" else 1.0)


def test_linear_heads_checks_its_shapes():
    weight, rows = packed_cases.random_weight("f32", 48, 8), packed_cases.rows_of(1)
    with pytest.raises(InvalidRequest, match="5 heads do not divide 48 rows"):
        OPS.linear_heads(torch.zeros(1, 40), weight, torch.zeros(1, 48), rows, heads=5)
    with pytest.raises(InvalidRequest, match="x has 7 channels per head, expected at least 8"):
        OPS.linear_heads(torch.zeros(1, 21), weight, torch.zeros(1, 48), rows, heads=3)
    with pytest.raises(UnsupportedOp, match="24 channels of a head are not a multiple of 16"):
        OPS.linear_heads(torch.zeros(1, 16), weight, torch.zeros(1, 48), rows, heads=2)


@pytest.mark.parametrize("op", ["write_latent", "latent_attention"])
@pytest.mark.parametrize(
    ("what", "index", "value", "message"),
    [
        ("slots", (0,), -1, r"slot -1 of row 0 is outside 0\.\.1"),
        ("positions", (3,), 48, r"position 48 of row 3 is outside 0\.\.47"),
        ("positions", (2,), 9, r"position 9 of row 2 does not follow position 31"),
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
    before, out = case.cache.rows.clone(), torch.full((len(rows), case.heads * case.rank), 7.0)
    native.set_threads(2)
    with pytest.raises(InvalidRequest, match=f"{op}: {message}"):
        if op == "write_latent":
            kv = case.kv[rows] + 1
            OPS.write_latent(kv, case.norm, case.cos, case.sin, case.cache, batch, eps=1e-6)
        else:
            q, absorbed = case.q[rows], case.absorbed[rows]
            OPS.latent_attention(q, absorbed, case.cache, out, batch, heads=4, scale=1.0)
    assert torch.equal(before.nan_to_num(), case.cache.rows.nan_to_num())
    assert (out == 7).all()


def test_shapes_are_checked():
    case = Case([20])
    batch, rows = case.batch([(0, 0, 20)])
    q, absorbed = case.q[rows], case.absorbed[rows]
    out = torch.zeros_like(absorbed)
    with pytest.raises(InvalidRequest, match="absorbed width is 128, expected 96"):
        OPS.latent_attention(q, absorbed, case.cache, out, batch, heads=3, scale=1.0)
    with pytest.raises(InvalidRequest, match="q has 8 channels per head, expected at least 16"):
        OPS.latent_attention(q[:, :32].contiguous(), absorbed, case.cache, out, batch, heads=4,
                             scale=1.0)  # fmt: skip
    with pytest.raises(InvalidRequest, match="rope channels is 16, expected 14"):
        OPS.write_latent(case.kv, case.norm, case.cos[:, 1:].contiguous(), case.sin, case.cache,
                         batch, eps=1e-6)  # fmt: skip
    wide = Case([4], rank=513)
    with pytest.raises(UnsupportedOp, match=r"rank 513 is outside 1\.\.512"):
        wide.write()

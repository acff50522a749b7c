"""Paged attention: against the float64 reference, and the same bits whatever a row runs beside."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_cases import DTYPES, OPS, ORACLE, PAIR_ISAS, SHAPES, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro import native
from moestro.core.errors import InvalidRequest, UnsupportedOp
from moestro.ops.contracts import KvLayer


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
    case.check(parts)


@pytest.mark.parametrize("sinks", [-torch.inf, -1e30, -20.0, 0.0, 4.0, 80.0, 1e30])
@pytest.mark.parametrize("window", [0, 1, 50])
def test_sinks_against_the_reference_and_every_isa(sinks: float, window: int):
    for shape in (SHAPES[2], SHAPES[3], SHAPES[6]):
        case = Case([1, 1, 590], window=window, sinks=sinks, **shape)
        case.write()
        parts = [(2, 0, 3), (0, 0, 1), (2, 505, 530), (1, 0, 1), (2, 589, 590)]
        got = case.check(parts)
        if sinks < -1e20:  # nothing is taken, to the last bit
            case.sinks = None
            assert torch.equal(case.attend(parts), got)
        if sinks > 1e20:
            assert not got.any()


@pytest.mark.parametrize("softcap", [1e-3, 2.0, 50.0, 1e30])
@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, 0), (torch.bfloat16, 40)])
def test_softcap_against_the_reference_and_every_isa(
    softcap: float, dtype: torch.dtype, window: int
):
    for shape in (SHAPES[2], SHAPES[3]):
        case = Case([1, 590], dtype=dtype, window=window, softcap=softcap, sinks=1.0, **shape)
        if softcap < 1e3:
            case.q[500:512] *= 1e3  # scores far beyond the cap
        case.write()
        parts = [(1, 495, 512), (0, 0, 1), (1, 588, 590)]
        # Scores near a large cap carry its rounding: 2^-22 of it each.
        case.check(parts, atol=5e-6 + 2**-21 * min(softcap, 50.0))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 2, 5, 7, 8, 12, 16, 20])
def test_head_sizes_and_group_ratios(head_dim: int, group: int):
    """Decode and short prefill of every shape that models have, far into a sequence."""
    for dtype in DTYPES:
        case = Case([330], heads=group, kv_heads=1, head_dim=head_dim, page_size=48, dtype=dtype)
        case.write()
        for parts in ([(0, 329, 330)], [(0, 254, 263)]):
            got = case.attend(parts)
            if case.takes_pairs and native.isa() in PAIR_ISAS:
                case.check_pairs(parts, got)
            else:
                torch.testing.assert_close(got, case.attend(parts, ORACLE), rtol=1e-5, atol=5e-6)


def test_bits_across_the_lengths_of_segments():
    """Splits lie at fixed positions, wider ones behind 8192: any chunk, any thread count."""
    case = Case([9300], heads=2, kv_heads=1, head_dim=16, dtype=torch.bfloat16)
    case.write()
    case.check([(0, 9290, 9300)])
    native.set_threads(1)
    whole = case.attend([(0, 8150, 9300)])
    for threads in (1, 3):
        native.set_threads(threads)
        for first, end in ((8191, 8192), (8190, 8200), (9215, 9217), (9299, 9300)):
            rows = whole[first - 8150 : end - 8150]
            assert torch.equal(case.attend([(0, first, end)]), rows), (threads, first, end)


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
@pytest.mark.parametrize(
    ("dtype", "head_dim", "window"),
    [
        (torch.float32, 20, 0),
        (torch.float16, 16, 700),
        (torch.bfloat16, 16, 0),
        (torch.bfloat16, 16, 33),
    ],
)
def test_bits_do_not_depend_on_batch_chunks_or_threads(
    threads: int, heads: int, dtype: torch.dtype, head_dim: int, window: int
):
    case = Case([1300, 530], heads=heads, kv_heads=2, head_dim=head_dim, window=window, dtype=dtype)
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
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.float32, 24), (torch.bfloat16, 32), (torch.float16, 32)]
)
def test_what_a_token_does_not_see_cannot_reach_it(
    poison: float, window: int, dtype: torch.dtype, head_dim: int
):
    """Unwritten places (NaN in every case here), later tokens, and keys before the window."""
    case = Case([100], heads=6, kv_heads=2, head_dim=head_dim, window=window, dtype=dtype)
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
    for softcap in (-1.0, torch.nan, torch.inf):
        with pytest.raises(InvalidRequest, match=r"softcap .* is not a finite number >= 0"):
            OPS.attention(q, case.cache, out, batch, heads=4, scale=1.0, softcap=softcap)
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

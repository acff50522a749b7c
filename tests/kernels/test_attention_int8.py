"""Attention over a cache of signed bytes: its rounding, its bits, and what it costs."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_cases import OPS, ORACLE, Case, unwritten_cache
from torch import Tensor

from moestro import native
from moestro.core.errors import InvalidRequest, UnsupportedOp
from moestro.nn.kv_cache import allocate_kv
from moestro.ops import kv_cache
from moestro.ops.contracts import KvLayer

SHAPES = [
    {"heads": 1, "kv_heads": 1, "head_dim": 16},
    {"heads": 9, "kv_heads": 3, "head_dim": 64},
    {"heads": 14, "kv_heads": 2, "head_dim": 80, "page_size": 48},
    {"heads": 6, "kv_heads": 2, "head_dim": 96, "page_size": 32},
    {"heads": 16, "kv_heads": 2, "head_dim": 128, "page_size": 64},
    {"heads": 5, "kv_heads": 1, "head_dim": 192},
    {"heads": 20, "kv_heads": 1, "head_dim": 256, "page_size": 128},
    {"heads": 100, "kv_heads": 1, "head_dim": 32},
]


def case_of(lengths: list[int], **options) -> Case:
    return Case(lengths, dtype=torch.int8, **options)


def check(case: Case, got: Tensor, oracle: Tensor) -> None:
    """The oracle reads the same codes and rounds queries alike, so what is left is the rounding of
    probabilities: 2^-15 of the largest among 64 keys each, 64 * 2^-15 of the largest value in all
    at the very worst, and far less as these errors are independent.
    """
    largest = case.v.abs().max()
    error = (got - oracle).abs()
    assert error.max() <= 2**-9 * largest
    assert error.square().mean().sqrt() <= 5e-5 * largest


def with_every_isa(case: Case, parts: list[tuple[int, int, int]]) -> Tensor:
    results = []
    for isa in native.supported_isas():
        native.set_isa(isa)
        results.append(case.attend(parts))
        assert torch.equal(results[0], results[-1]), isa
    return results[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [0, 1, 50, 300])
def test_against_the_reference_and_every_isa(shape: dict[str, int], window: int):
    case = case_of([1, 19, 590, 66], window=window, **shape)
    case.write()
    parts = [(2, 250, 262), (0, 0, 1), (2, 505, 530), (1, 0, 19), (3, 65, 66), (2, 589, 590)]
    check(case, with_every_isa(case, parts), case.attend(parts, ORACLE))


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"sinks": 2.0}, {"softcap": 9, "sinks": 0}])
def test_softcap_and_sinks(options: dict[str, float]):
    case = case_of([1, 590], window=70, **options, **SHAPES[2])
    case.write()
    parts = [(1, 0, 5), (0, 0, 1), (1, 500, 520)]
    check(case, with_every_isa(case, parts), case.attend(parts, ORACLE))


@pytest.mark.parametrize("shape", SHAPES[:4])
def test_write_kv_equals_the_reference_bit_by_bit(shape: dict[str, int]):
    case = case_of([70, 5], **shape)
    random = torch.Generator().manual_seed(1)
    for x in (case.k, case.v):  # from subnormal to huge, and exact zeros
        x *= 10 ** (torch.rand(x.shape, generator=random) * 80 - 42)
        x[3], x[4, ::2] = 0.0, 0.0
        x[9] = torch.linspace(-127, 127, x.shape[1])
    case.k[1], case.k[2], case.v[1], case.v[2, 3] = torch.nan, torch.inf, -torch.inf, torch.nan
    tensors = (case.cache.k, case.cache.v, case.cache.k_scale, case.cache.v_scale)
    for x in tensors:
        x.fill_(7)
    batch, rows = case.batch(case.whole())
    ORACLE.write_kv(case.k[rows], case.v[rows], case.cache, batch)
    wanted = [x.clone() for x in tensors]
    for isa in native.supported_isas():
        native.set_isa(isa)
        for x in tensors:
            x.fill_(7)
        case.write()
        for x, want in zip(tensors, wanted, strict=True):
            assert torch.equal(x.nan_to_num(), want.nan_to_num()), isa
            assert torch.equal(x.isnan(), want.isnan()), isa


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 1e20])
def test_stored_elements_are_within_the_stated_bound(magnitude: float):
    shape = {"kv_heads": 2, "head_dim": 80}
    cache = unwritten_cache(pages=2, page_size=16, dtype=torch.int8, **shape)
    random = torch.Generator().manual_seed(0)
    k, v = (torch.randn(32, 2, 80, generator=random) * magnitude for _ in range(2))
    pages, offsets = torch.arange(32) // 16, torch.arange(32) % 16
    kv_cache.store(cache, pages, offsets, k, v)
    gathered = zip(kv_cache.gather(cache, pages, offsets), (k, v), (32, 80), strict=True)
    for stored, x, channels in gathered:
        parts = zip(stored.split(channels, -1), x.split(channels, -1), strict=True)
        for read, written in parts:
            bound = written.abs().amax(-1, keepdim=True) / 252
            assert ((read - written).abs() <= bound).all()
    rounded = kv_cache.round_query(k)
    assert ((rounded - k).abs() <= k.abs().max() / 254 * (1 + 1e-6)).all()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("heads", "window"), [(2, 0), (6, 700), (34, 0)])
def test_bits_do_not_depend_on_batch_chunks_or_threads(threads: int, heads: int, window: int):
    case = case_of([1300, 530], heads=heads, kv_heads=2, head_dim=32, window=window)
    case.write()
    native.set_threads(1)
    whole = case.attend()
    native.set_threads(threads)
    assert torch.equal(case.attend(), whole)
    for first, end in itertools.pairwise([0, 1, 97, 255, 257, 513, 1299, 1300]):
        assert torch.equal(case.attend([(0, first, end)]), whole[first:end]), (first, end)
    assert torch.equal(case.attend([(1, 529, 530), (0, 1299, 1300)]), whole[[1829, 1299]])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("spoilt", "window"), [("k", 0), ("v", 0), ("k", 20), ("v", 20)])
def test_what_a_token_does_not_see_cannot_reach_it(poison: float, spoilt: str, window: int):
    case = case_of([100], heads=6, kv_heads=2, head_dim=48, window=window)
    case.write()
    clean = case.attend()
    getattr(case, spoilt)[60] = poison
    case.write()
    poisoned = case.attend()
    blind_from = 80 if window else 100
    assert torch.equal(poisoned[:60], clean[:60])
    assert poisoned[60:blind_from].isnan().all()
    assert torch.equal(poisoned[blind_from:], clean[blind_from:])


def test_a_query_of_nan_spoils_only_its_own_row():
    case = case_of([40], heads=4, kv_heads=1, head_dim=32)
    case.write()
    clean = case.attend()
    case.q[20] = torch.nan
    spoiled = case.attend()
    assert spoiled[20].isnan().all()
    keep = [i for i in range(40) if i != 20]
    assert torch.equal(spoiled[keep], clean[keep])


@pytest.mark.parametrize("largest", [0.0, 1e-38, 1e4])
def test_extreme_inputs(largest: float):
    """All zero, vanishing, and scores so large that one key takes everything."""
    case = case_of([300], heads=8, kv_heads=1, head_dim=32)
    for x in (case.q, case.k, case.v):
        x *= largest
    case.write()
    got = with_every_isa(case, [(0, 0, 300)])
    assert got.isfinite().all()
    if largest < 1:
        assert got.abs().max() <= largest * 5
    else:
        check(case, got, case.attend([(0, 0, 300)], ORACLE))


def test_every_code_meets_every_extreme_digit():
    """Keys and queries of -127 and 127 alone, in every place: sums as large as they get."""
    case = case_of([64], heads=4, kv_heads=1, head_dim=256)
    signs = torch.Generator().manual_seed(3)
    for x in (case.q, case.k, case.v):
        x.copy_(torch.randint(0, 2, x.shape, generator=signs) * 2.0 - 1.0)
    case.q[-1], case.k[-1], case.v[-1] = -1.0, -1.0, -1.0
    case.write()
    parts = [(0, 0, 64)]
    check(case, with_every_isa(case, parts), case.attend(parts, ORACLE))


def test_what_it_costs_against_float32():
    """Random keys and values lose what two roundings to bytes lose: below 2 % of the spread."""
    exact = Case([700], heads=8, kv_heads=2, head_dim=64)
    coarse = case_of([700], heads=8, kv_heads=2, head_dim=64)
    for case in (exact, coarse):
        case.write()
    wanted, got = exact.attend(), coarse.attend()
    assert (got - wanted).square().mean().sqrt() <= 0.02 * wanted.square().mean().sqrt()


def test_shapes_are_checked():
    case = case_of([20])
    batch, rows = case.batch([(0, 0, 20)])
    q, out, full = case.queries(rows), torch.empty_like(case.queries(rows)), case.cache

    def attend(**changes: Tensor | None) -> None:
        tensors = {"k": full.k, "v": full.v, "k_scale": full.k_scale, "v_scale": full.v_scale}
        cache = KvLayer(**(tensors | changes))
        OPS.attention(q, cache, out, batch, heads=4, scale=1.0)

    with pytest.raises(InvalidRequest, match=r"cache\.k_scale is missing"):
        attend(k_scale=None)
    with pytest.raises(InvalidRequest, match=r"cache\.v_scale is not bfloat16"):
        attend(v_scale=full.v_scale.half())
    with pytest.raises(InvalidRequest, match=r"cache\.k_scale has 4 dimensions, expected 5"):
        attend(k_scale=full.k_scale[..., 0].contiguous())
    with pytest.raises(InvalidRequest, match=r"cache\.v_scale has size 15 in dimension 2"):
        attend(v_scale=full.v_scale[..., :15].contiguous())
    with pytest.raises(InvalidRequest, match=r"cache\.k has size 7 in dimension 3, expected 8"):
        attend(k=full.k[:, :, :, :7].contiguous())
    odd = torch.zeros(2, 2, 4, 24, 4, dtype=torch.uint8)
    with pytest.raises(UnsupportedOp, match="head_dim 24 of an int8 cache is not a multiple of 16"):
        attend(v=odd)
    with pytest.raises(InvalidRequest, match="multiple of 16, not 24"):
        allocate_kv(pages=1, page_size=16, kv_heads=1, head_dim=24, dtype=torch.int8)

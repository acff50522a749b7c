"""Experts read when needed: the same bits as from memory, however reads are timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import packed_cases as cases
import pytest
import torch
from test_moe import Case, make
from torch import Tensor

from moestro import native
from moestro.core.errors import InvalidRequest, StorageError
from moestro.memory.arena import aligned_buffer

core = native.core
FORMATS = (("int4-g32",) * 3, ("k4", "k4", "k6"), ("int8-row",) * 3, ("iq2xs", "iq1m", "nvfp4"))


@dataclass
class Streamed:
    """A case whose experts lie on a model of a disk, behind a cache of some slots."""

    case: Case
    reader: Any
    cache: Any

    def run(self, **options: object) -> Tensor:
        return self.case.run(cache=self.cache, **options)

    def stats(self, phase: str) -> dict[str, Any]:
        found: dict[str, Any] = self.cache.stats()[phase]
        return found


def streamed(case: Case, slots: int, *, seed: int = 0, queue: int = 3, **options: Any) -> Streamed:
    bank = case.bank
    blob = bank.layout.nbytes
    reader = core.ModelReader([bank.buffer.clone()], seed)
    cache = core.ExpertCache.make(
        reader, 0, 0, blob, aligned_buffer(slots * blob), bank.num_experts, queue_depth=queue,
        **options,
    )  # fmt: skip
    return Streamed(case=case, reader=reader, cache=cache)


def reroute(case: Case, seed: int) -> None:
    """Other experts for the same tokens."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(case.x.shape[0], case.bank.num_experts, generator=generator)
    weights, ids = scores.topk(case.ids.shape[1], dim=1)
    case.weights.copy_(weights)
    case.ids.copy_(ids)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("names", FORMATS)
@pytest.mark.parametrize("tokens", [1, 3, 19, 140])
def test_same_bits_with_any_number_of_slots(
    names: tuple[str, str, str], tokens: int, threads: int
) -> None:
    case = make(names, tokens=tokens, hidden=256, inter=256, experts=9)
    start = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(3))
    with cases.running(native.isa(), threads):
        for slots in (1, 2, 4, 9):
            one = streamed(case, slots, seed=slots)
            for seed in range(4):
                reroute(case, seed)
                assert torch.equal(one.run(), case.run()), (slots, seed)
                expected = case.run(out=start.clone(), accumulate=True)
                assert torch.equal(one.run(out=start.clone(), accumulate=True), expected)


@pytest.mark.parametrize("isa", cases.ISAS)
@pytest.mark.parametrize("name", ["int4-g32", "k6", "f32", "bf16"])
def test_same_bits_on_every_isa(isa: str, name: str) -> None:
    case = make((name,) * 3, tokens=21, hidden=100, inter=40, experts=7, biased=True, top_k=3)
    with cases.running(isa, 2):
        for seed in range(3):
            assert torch.equal(streamed(case, 3, seed=seed).run(), case.run())


@pytest.mark.parametrize("team", [(1, 1), (2, 1), (1, 1, 1, 1)])
def test_same_bits_on_any_number_of_nodes(team: tuple[int, ...]) -> None:
    case = make(("int4-g32",) * 3, tokens=5, hidden=160, inter=96, experts=9)
    expected = case.run()
    nodes = [node for node, threads in enumerate(team) for _ in range(threads)]
    native.set_team(nodes, [()] * len(nodes), [0] * len(team))
    for slots in (2, 5):
        assert torch.equal(streamed(case, slots).run(), expected)


def test_shared_experts_come_last() -> None:
    case = make(("int4-g32",) * 3, tokens=33, experts=6)
    other = make(("k6",) * 3, tokens=33, inter=40, experts=1, top_k=1, seed=5)
    ids = torch.zeros(33, 1, dtype=torch.int32)
    bank = other.bank
    shared = core.ExpertTable(
        ids, other.weights, bank.pointers,
        [(p.format_name, p.rows, p.cols, p.offset) for p in bank.projections], bank.activation,
    )  # fmt: skip
    expected = case.run(shared=shared)
    assert not torch.equal(expected, case.run())
    for slots in (1, 3, 6):
        assert torch.equal(streamed(case, slots).run(shared=shared), expected)
    case.ids.fill_(-1)
    assert torch.equal(streamed(case, 2).run(shared=shared), case.run(shared=shared))


def test_experts_may_want_channels_in_their_own_orders() -> None:
    case = make(("int4-g32",) * 3, tokens=9, experts=6)
    generator = torch.Generator().manual_seed(1)
    orders = torch.stack([torch.randperm(96, generator=generator) for _ in range(6)]).int()
    expected = case.run(input_orders=orders)
    assert not torch.equal(expected, case.run())
    assert torch.equal(streamed(case, 2).run(input_orders=orders), expected)


def test_tokens_without_experts_give_zeros() -> None:
    case = make(("int4-g32",) * 3, tokens=4)
    case.ids.fill_(-1)
    one = streamed(case, 2)
    assert torch.equal(one.run(out=torch.ones_like(case.x)), torch.zeros_like(case.x))
    assert one.reader.reads() == 0


@pytest.mark.parametrize("policy", ["auto", *core.cache_policies()])
def test_each_expert_is_read_once_per_chunk_and_not_again_while_it_stays(policy: str) -> None:
    case = make(("int4-g32",) * 3, tokens=1, experts=12, top_k=3)
    for slots in (3, 5, 8, 12):
        one = streamed(case, slots, policy=policy)
        for seed in range(40):
            reroute(case, seed)
            before = one.reader.reads()
            one.run()
            assert one.reader.reads() - before <= 3
            before = one.reader.reads()
            assert torch.equal(one.run(), case.run())
            assert one.reader.reads() == before, "all three experts have just been used"
        counts = one.stats("decode")
        assert counts["hits"] + counts["misses"] == 80 * 3
        assert counts["misses"] == one.reader.reads()
        assert counts["nbytes"] == counts["misses"] * case.bank.layout.nbytes
        assert one.cache.stats()["resident"] <= slots
        if policy != "auto":
            assert counts["misses"] == counts["shadow_misses"][policy], "it is its own shadow"


@pytest.mark.parametrize("slots", [1, 2, 5, 11])
def test_chunks_that_need_more_experts_than_slots(slots: int) -> None:
    case = make(("int4-g32",) * 3, tokens=90, experts=12, top_k=4)
    one = streamed(case, slots, queue=2)
    touched = len(set(case.ids.flatten().tolist()))
    for _ in range(5):
        before = one.reader.reads()
        assert torch.equal(one.run(), case.run())
        assert touched - slots <= one.reader.reads() - before <= touched
    assert one.stats("prefill")["misses"] == one.reader.reads()
    assert one.stats("decode")["misses"] == 0


def test_residents_follow_from_the_selections_alone() -> None:
    case = make(("int4-g32",) * 3, tokens=30, experts=16, top_k=3)
    found = []
    for seed in range(4):  # of the timing
        one = streamed(case, 5, seed=seed)
        for route in range(12):
            reroute(case, route)
            one.run(rows=slice(0, (1, 30)[route % 2]))
        found.append(one.cache.stats())
    assert all(stats == found[0] for stats in found)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_failed_read_is_an_error_and_leaves_no_wrong_bytes(threads: int) -> None:
    case = make(("int4-g32",) * 3, tokens=25, experts=10, top_k=3)
    with cases.running(native.isa(), threads):
        expected = case.run()
        for slots in (1, 3, 9):
            one = streamed(case, slots, queue=4)
            for reads in (0, 1, 3, 0):
                one.reader.fail_after(reads)
                with pytest.raises(StorageError, match="model disk"):
                    for seed in range(50):
                        reroute(case, seed)
                        one.run()
                reroute(case, 0)
                assert torch.equal(one.run(), case.run())
        assert expected.isfinite().all()


def test_a_recorded_program_streams_and_keeps_its_cache() -> None:
    case = make(("int4-g32",) * 3, tokens=2, experts=8)
    one = streamed(case, 3)
    out, program = torch.zeros_like(case.x), core.Program()
    bank = case.bank
    core.moe(
        program, case.x, case.ids, case.weights, torch.zeros(8, dtype=torch.int64),
        [(p.format_name, p.rows, p.cols, p.offset) for p in bank.projections],
        bank.activation, out, cases.rows_of(2), cache=one.cache,
    )  # fmt: skip
    one.cache = None
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        case.ids.copy_(torch.rand(2, 8, generator=generator).topk(2, dim=1).indices)
        program.replay()
        assert torch.equal(out, case.run())


def test_a_skewed_stream_hits_more_than_slots_alone_would() -> None:
    """Half of the tokens go to a few hot experts; after warming up those should be in memory."""
    case = make(("int4-g32",) * 3, tokens=1, experts=40, top_k=2)
    generator = torch.Generator().manual_seed(0)
    popularity = 1.0 / torch.arange(1, 41).double() ** 1.2
    one = streamed(case, 10)
    for _ in range(400):
        case.ids.copy_(torch.multinomial(popularity, 2, generator=generator))
        one.run()
    counts = one.stats("decode")
    best = min(counts["shadow_misses"].values())
    assert counts["misses"] <= 1.15 * best
    assert counts["hits"] > 0.5 * (counts["hits"] + counts["misses"])


def test_what_cannot_work_is_refused() -> None:
    case = make(("int4-g32",) * 3, tokens=1, experts=5)
    with pytest.raises(InvalidRequest, match="lfu, lru, lfru, static"):
        streamed(case, 2, policy="fifo")
    with pytest.raises(InvalidRequest, match="between 1 and 5"):
        streamed(case, 6)
    other = streamed(make(("int4-g32",) * 3, tokens=1, experts=6), 2)
    with pytest.raises(InvalidRequest, match="experts of the cache is 6, expected 5"):
        case.run(cache=other.cache)
    case.ids.fill_(7)
    with pytest.raises(InvalidRequest, match="7"):
        streamed(case, 2).run()
    with pytest.raises(InvalidRequest, match="profile of 2"):
        other.cache.set_prior([1.0, 2.0])

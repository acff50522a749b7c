"""Scheduler properties on a fake model whose cache is a dictionary.

The fake writes each computed token into (page, offset) and, where logits are asked for, reads the
whole sequence back through its pages: so a page with two owners, a stale page or a skipped position
shows as a wrong token, whatever the schedule was.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.core.errors import InvalidRequest, OutOfBudget
from moestro.engine.pages import PagePool
from moestro.engine.scheduler import Scheduler, Sequence, Work

PAGE = 16


class FakeEngine:
    """Drives a scheduler as the engine does and checks every step."""

    def __init__(self, *, pages: int, slots: int, budget: int, context: int) -> None:
        self.pool = PagePool(total=pages, page_size=PAGE)
        self.scheduler = Scheduler(
            self.pool, max_sequences=slots, max_batch_tokens=budget, context=context
        )
        self.slots, self.budget = slots, budget
        self.cells: dict[tuple[int, int], int] = {}
        self.limits: dict[str, int] = {}
        self.done: dict[str, list[int]] = {}
        self.started: list[str] = []
        self.computed_tokens = 0

    def add(self, name: str, prompt: list[int], max_tokens: int) -> Sequence:
        sequence = Sequence(id=name, tokens=list(prompt), prompt_length=len(prompt))
        self.scheduler.add(sequence)
        self.limits[name] = max_tokens
        return sequence

    def step(self) -> list[Work]:
        work = self.scheduler.schedule()
        self.check(work)
        for item in work:
            self.compute(item)
        self.scheduler.advance(work)
        for item in work:
            if item.logits:
                self.emit(item.sequence)
        return work

    def check(self, work: list[Work]) -> None:
        scheduler = self.scheduler
        assert sum(item.count for item in work) <= self.budget
        assert all(item.count > 0 for item in work)
        assert len({id(item.sequence) for item in work}) == len(work)
        assert len(scheduler.running) <= self.slots
        assert len({s.slot for s in scheduler.running}) == len(scheduler.running)
        owned = [page for s in scheduler.running for page in s.pages]
        assert len(owned) == len(set(owned))
        assert self.pool.free + len(owned) + scheduler.kept_pages == self.pool.total
        order = [s.arrival for s in scheduler]
        assert order == sorted(order), "running must be older than waiting, both in order"
        assert all(not s.pages for s in scheduler.waiting)
        if not scheduler.idle:
            assert work, "a scheduler that is not idle must make progress"
            oldest = scheduler.running[0]
            assert any(item.sequence is oldest for item in work), "the oldest must progress"

    def compute(self, item: Work) -> None:
        sequence = item.sequence
        assert item.start == sequence.computed
        if sequence.id not in self.started:
            self.started.append(sequence.id)
        for position in range(item.start, item.start + item.count):
            page = sequence.pages[position // PAGE]
            self.cells[page, position % PAGE] = sequence.tokens[position]
        self.computed_tokens += item.count
        assert item.logits == (item.start + item.count == len(sequence.tokens))

    def emit(self, sequence: Sequence) -> None:
        seen = [
            self.cells[sequence.pages[p // PAGE], p % PAGE] for p in range(len(sequence.tokens))
        ]
        assert seen == sequence.tokens
        sequence.tokens.append(next_token(seen))
        generated = len(sequence.tokens) - sequence.prompt_length
        if generated == self.limits[sequence.id] or len(sequence.tokens) == self.scheduler.context:
            self.done[sequence.id] = sequence.tokens
            self.scheduler.remove(sequence)

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError("the scheduler does not finish")


def next_token(tokens: list[int]) -> int:
    return (sum((i + 1) * t for i, t in enumerate(tokens)) * 31 + 7) % 11


def expected(prompt: list[int], max_tokens: int, context: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < context and len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
    return tokens


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 10), min_size=1, max_size=70),
        st.integers(1, 60),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=9,
)


@settings(deadline=None, max_examples=150)
@given(
    requests=requests,
    pages=st.integers(6, 14),
    slots=st.integers(1, 5),
    budget=st.integers(5, 80),
)
def test_every_request_finishes_as_if_alone(
    requests: list[tuple[list[int], int, int]], pages: int, slots: int, budget: int
) -> None:
    context = 6 * PAGE
    fake = FakeEngine(pages=pages, slots=slots, budget=budget, context=context)
    for index, (prompt, max_tokens, pause) in enumerate(requests):
        fake.add(str(index), prompt, max_tokens)
        for _ in range(pause):
            fake.step()
    fake.run()
    for index, (prompt, max_tokens, _) in enumerate(requests):
        assert fake.done[str(index)] == expected(prompt, max_tokens, context)
    assert fake.started == [str(i) for i in range(len(requests))], "first come, first served"
    fake.scheduler.drop_kept()
    assert fake.pool.free == pages


@settings(deadline=None, max_examples=100)
@given(requests=requests, cancel=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 6))))
def test_cancelling_leaks_nothing_and_disturbs_nobody(
    requests: list[tuple[list[int], int, int]], cancel: list[tuple[int, int]]
) -> None:
    fake = FakeEngine(pages=9, slots=3, budget=17, context=6 * PAGE)
    sequences = [fake.add(str(i), prompt, n) for i, (prompt, n, _) in enumerate(requests)]
    cancelled = set()
    for index, pause in cancel:
        for _ in range(pause):
            fake.step()
        if index < len(sequences) and sequences[index] in list(fake.scheduler):
            fake.scheduler.remove(sequences[index])
            cancelled.add(str(index))
    fake.run()
    for index, (prompt, max_tokens, _) in enumerate(requests):
        if str(index) not in cancelled:
            assert fake.done[str(index)] == expected(prompt, max_tokens, 6 * PAGE)
    fake.scheduler.drop_kept()
    assert fake.pool.free == 9


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("budget", [1, 15, 16, 17, 64])
def test_chunk_and_page_edges(length: int, budget: int) -> None:
    fake = FakeEngine(pages=4, slots=1, budget=budget, context=4 * PAGE)
    prompt = [i % 11 for i in range(length)]
    fake.add("a", prompt, 20)
    counts = [fake.step()[0].count for _ in range(-(-length // budget))]
    assert counts == [budget] * (length // budget) + [length % budget] * bool(length % budget)
    fake.run()
    assert fake.done["a"] == expected(prompt, 20, 4 * PAGE)


def test_decode_goes_on_while_a_long_prompt_is_prefilled() -> None:
    fake = FakeEngine(pages=20, slots=2, budget=8, context=10 * PAGE)
    short = fake.add("short", [1], 50)
    fake.step()
    fake.add("long", [2] * 100, 1)
    for _ in range(10):
        before = len(short.tokens)
        work = fake.step()
        assert len(short.tokens) == before + 1
        assert [item.count for item in work] == [1, 7]


def test_the_youngest_is_preempted_and_its_answer_is_the_same() -> None:
    fake = FakeEngine(pages=4, slots=2, budget=64, context=4 * PAGE)
    old = fake.add("old", [1] * 20, 40)
    young = fake.add("young", [2] * 20, 40)
    fake.run()
    assert old.preemptions == 0
    assert young.preemptions >= 1
    assert fake.done["old"] == expected([1] * 20, 40, 64)
    assert fake.done["young"] == expected([2] * 20, 40, 64)


def test_a_step_that_failed_is_scheduled_again_the_same() -> None:
    fake = FakeEngine(pages=8, slots=2, budget=10, context=4 * PAGE)
    fake.add("a", [1] * 15, 3)
    fake.add("b", [2] * 4, 3)
    first = fake.scheduler.schedule()
    assert fake.scheduler.schedule() == first
    fake.run()
    assert fake.done["a"] == expected([1] * 15, 3, 64)


@pytest.mark.parametrize("first", [1, 2, 14, 15, 16, 17, 30, 31, 32, 33])
@pytest.mark.parametrize("answer", [1, 2, 17])
def test_second_turn_computes_only_new_tokens(first: int, answer: int) -> None:
    fake = FakeEngine(pages=12, slots=2, budget=16, context=6 * PAGE)
    fake.add("one", [3] * first, answer)
    fake.run()
    turn = fake.done["one"]
    known = len(turn) - 1  # the last sampled token was never computed
    before = fake.computed_tokens
    second = fake.add("two", [*turn, 5, 6, 7], 2)
    fake.run()
    assert second.reused == known
    assert fake.computed_tokens - before == len(turn) + 3 - known + 1
    assert fake.done["two"] == expected([*turn, 5, 6, 7], 2, 6 * PAGE)


def test_a_diverging_turn_reuses_the_common_part() -> None:
    fake = FakeEngine(pages=12, slots=1, budget=64, context=6 * PAGE)
    fake.add("one", [3] * 40, 10)
    fake.run()
    second = fake.add("two", [3] * 35 + [9] * 5, 3)
    fake.run()
    assert second.reused == 35
    assert fake.done["two"] == expected([3] * 35 + [9] * 5, 3, 6 * PAGE)


def test_a_repeated_prompt_still_computes_its_last_token() -> None:
    fake = FakeEngine(pages=12, slots=1, budget=64, context=6 * PAGE)
    fake.add("one", [3] * 33, 5)
    fake.run()
    again = fake.add("two", [3] * 33, 5)
    fake.run()
    assert again.reused == 32
    assert fake.done["two"] == fake.done["one"]


def test_kept_pages_are_free_to_whoever_needs_them() -> None:
    fake = FakeEngine(pages=6, slots=1, budget=64, context=6 * PAGE)
    fake.add("one", [3] * 80, 5)
    fake.run()
    assert fake.scheduler.kept_pages > 0
    fake.add("two", [4] * 90, 3)
    fake.run()
    assert fake.done["two"] == expected([4] * 90, 3, 6 * PAGE)


def test_refusals_at_the_door_name_both_numbers() -> None:
    fake = FakeEngine(pages=4, slots=1, budget=8, context=50)
    with pytest.raises(InvalidRequest, match="empty"):
        fake.add("a", [], 1)
    with pytest.raises(InvalidRequest, match=r"50 tokens.*holds 50"):
        fake.add("b", [1] * 50, 1)
    assert fake.scheduler.idle
    fake.add("c", [1] * 49, 9)
    fake.run()
    assert len(fake.done["c"]) == 50


def test_pool_refuses_whole_and_notices_foreign_pages() -> None:
    pool = PagePool(total=3, page_size=PAGE)
    pages = pool.take(2)
    with pytest.raises(OutOfBudget, match=r"2 KV pages.*1 of 3 are free"):
        pool.take(2)
    assert pool.free == 1
    pool.give_back(pages)
    with pytest.raises(ValueError, match="not handed out"):
        pool.give_back(pages[:1])
    assert pool.free == 3

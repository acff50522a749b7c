"""Which tokens of which sequences the next step computes.

Continuous batching over a ragged batch: every decoding sequence gets its token first, then prompts
are prefilled in chunks, first come first served, under the step's token budget. A sequence is
admitted only when the pages for its tokens and one more exist. One that grows and finds no page
takes them from kept (finished) sequences, then from the youngest running one, which goes back to
the head of the queue and is computed again later from its prompt and what it had generated.

Two facts make this free of deadlock and of starvation: all running sequences are older than all
waiting ones, so the oldest is never preempted for another; and a sequence alone always fits,
because ``context`` is no more than the pool holds.

Finished sequences are kept while pages allow, and a new one whose tokens start the same way takes
over the pages: the second turn of a conversation prefills only what is new.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from moestro.core.errors import InvalidRequest
from moestro.engine.pages import PagePool


@dataclass(eq=False, kw_only=True)
class Sequence:
    """One request's tokens and where their keys and values are.

    tokens: prompt, then what was generated. computed: leading positions whose keys and values lie
    in ``pages``. reused: positions taken over from a kept sequence at the last admission.
    """

    id: str
    tokens: list[int]
    prompt_length: int
    arrival: int = -1
    computed: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    reused: int = 0
    preemptions: int = 0

    @property
    def remaining(self) -> int:
        """Positions still to be computed."""
        return len(self.tokens) - self.computed


@dataclass(frozen=True, kw_only=True)
class Work:
    """Positions [start, start + count) of a sequence; ``logits`` asks for those of the last."""

    sequence: Sequence
    start: int
    count: int
    logits: bool


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """A finished sequence whose keys and values are still there."""

    tokens: list[int]
    pages: list[int]


class Scheduler:
    """Waiting, running and kept sequences over one page pool."""

    def __init__(
        self, pool: PagePool, *, max_sequences: int, max_batch_tokens: int, context: int
    ) -> None:
        if context > pool.total * pool.page_size:
            raise ValueError(f"context {context} is more than {pool.total} pages hold")
        if max_batch_tokens < max_sequences:
            raise ValueError("max_batch_tokens must be at least max_sequences")
        self.pool = pool
        self.max_batch_tokens = max_batch_tokens
        self.context = context
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._kept: list[_Kept] = []
        self._slots = list(range(max_sequences - 1, -1, -1))
        self._arrivals = 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def kept_pages(self) -> int:
        """Pages held by finished sequences; they are free to whoever needs them."""
        return sum(len(kept.pages) for kept in self._kept)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises InvalidRequest if it can never be computed."""
        length = len(sequence.tokens)
        if length == 0:
            raise InvalidRequest("the prompt is empty: at least one token is needed")
        if length >= self.context:
            raise InvalidRequest(
                f"the prompt has {length} tokens, but the context holds {self.context} tokens "
                f"(prompt and answer together); shorten it or start with a larger context"
            )
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.append(sequence)

    def schedule(self) -> list[Work]:
        """Choose the next step's work and own the pages it writes. Empty only when idle.

        Nothing counts as computed until ``advance``; a step that failed can be scheduled again.
        """
        budget = self.max_batch_tokens
        work: list[Work] = []
        for sequence in list(self.running):
            if sequence.remaining == 1 and sequence in self.running and self._grow(sequence):
                work.append(_chunk(sequence, 1))
                budget -= 1
        for sequence in self.running:
            if sequence.remaining > 1 and budget > 0:
                work.append(_chunk(sequence, min(budget, sequence.remaining)))
                budget -= work[-1].count
        while budget > 0 and self.waiting and self._admit(self.waiting[0]):
            sequence = self.running[-1]
            work.append(_chunk(sequence, min(budget, sequence.remaining)))
            budget -= work[-1].count
        return work

    def advance(self, work: list[Work]) -> None:
        """Count the work of a step that ran as computed."""
        for item in work:
            item.sequence.computed += item.count

    def remove(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Take out a finished or cancelled sequence. With ``keep`` its computed positions stay
        for a later one that starts with the same tokens.
        """
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._slots.append(sequence.slot)
        used = self.pool.pages_for(sequence.computed) if keep else 0
        self.pool.give_back(sequence.pages[used:])
        if used:
            self._kept.append(
                _Kept(tokens=sequence.tokens[: sequence.computed], pages=sequence.pages[:used])
            )
        sequence.pages, sequence.slot = [], -1

    def drop_kept(self) -> None:
        """Give back the pages of all finished sequences."""
        while self._kept:
            self.pool.give_back(self._kept.pop(0).pages)

    def _grow(self, sequence: Sequence) -> bool:
        """Own a page for the next position; False if the sequence itself had to step back."""
        need = self.pool.pages_for(sequence.computed + 1) - len(sequence.pages)
        while need > self.pool.free:
            if self._kept:
                self.pool.give_back(self._kept.pop(0).pages)
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        if need > 0:
            sequence.pages += self.pool.take(need)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._slots.append(sequence.slot)
        self.pool.give_back(sequence.pages)
        sequence.pages, sequence.slot, sequence.computed, sequence.reused = [], -1, 0, 0
        sequence.preemptions += 1
        self.waiting.insert(0, sequence)

    def _admit(self, sequence: Sequence) -> bool:
        """Start the head of the queue if a slot and its pages are there."""
        if not self._slots:
            return False
        common, kept = self._longest_prefix(sequence)
        total = self.pool.pages_for(len(sequence.tokens) + 1)
        # One that was preempted waits for room to grow too, or it would be preempted again soon.
        spare = len(self.running) if sequence.preemptions else 0
        if total + spare > self.pool.free + self.kept_pages:
            return False
        if kept is not None:
            self._kept.remove(kept)
            used = self.pool.pages_for(common)
            sequence.pages = kept.pages[:used]
            self.pool.give_back(kept.pages[used:])
        while total - len(sequence.pages) > self.pool.free:
            self.pool.give_back(self._kept.pop(0).pages)
        sequence.pages = sequence.pages + self.pool.take(total - len(sequence.pages))
        sequence.computed = sequence.reused = common
        sequence.slot = self._slots.pop()
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def _longest_prefix(self, sequence: Sequence) -> tuple[int, _Kept | None]:
        """(positions, kept sequence) to take over, or (0, None).

        The last token is always computed, since its logits are needed. A prefix shorter than a
        page is not worth ending a kept sequence for, unless it is half of it.
        """
        best: tuple[int, _Kept | None] = (0, None)
        for kept in reversed(self._kept):
            common = _common_prefix(kept.tokens, sequence.tokens)
            common = min(common, len(sequence.tokens) - 1)
            enough = min(self.pool.page_size, -(-len(kept.tokens) // 2))
            if common >= enough and common > best[0]:
                best = (common, kept)
        return best

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences that are not finished, oldest first."""
        yield from self.running
        yield from self.waiting


def _chunk(sequence: Sequence, count: int) -> Work:
    start = sequence.computed
    return Work(
        sequence=sequence,
        start=start,
        count=count,
        logits=start + count == len(sequence.tokens),
    )


def _common_prefix(a: list[int], b: list[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))

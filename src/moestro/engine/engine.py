"""The engine: requests in, steps, outputs out. One thread drives it.

``step`` is schedule, forward, sample, emit. A request that fails ends with its error and disturbs
no other; a step that fails leaves every request where it was, to be tried again or cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moestro.core.errors import InvalidRequest, MoestroError
from moestro.engine.config import DEFAULT_CONTEXT, EngineConfig
from moestro.engine.pages import PagePool
from moestro.engine.request import FinishReason, Output, Request, Timings, TokenLogprob, Usage
from moestro.engine.runner import Runner
from moestro.engine.sampler import Sampler
from moestro.engine.scheduler import Scheduler, Sequence
from moestro.models.spec import Model
from moestro.text.stream import StopMatcher, StreamDecoder


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer (see ``text``)."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    def stream(self) -> StreamDecoder: ...


@dataclass(eq=False, kw_only=True)
class _Live:
    """A request that is not finished, with all state of its own."""

    request: Request
    sequence: Sequence
    sampler: Sampler
    decoder: StreamDecoder
    matcher: StopMatcher
    cached: int = 0
    started: float | None = None
    first: float | None = None
    last: float | None = None


class Engine:
    """Runs requests on one model. ``pages`` KV pages; by default enough for ``max_sequences``
    sequences of ``context`` tokens.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        *,
        pages: int | None = None,
    ) -> None:
        config = config or EngineConfig()
        limit = model.spec.context_length
        self.context = config.context or min(limit, DEFAULT_CONTEXT)
        if self.context > limit:
            raise InvalidRequest(f"context {self.context} is more than the model's {limit} tokens")
        per_sequence = -(-self.context // config.page_size)
        pages = per_sequence * config.max_sequences if pages is None else pages
        if pages < per_sequence:
            raise InvalidRequest(
                f"{pages} KV pages of {config.page_size} positions cannot hold one sequence of "
                f"{self.context} tokens; give at least {per_sequence} or a smaller context"
            )
        self.config = config
        self._vocab_size = model.spec.vocab_size
        self._tokenizer = tokenizer
        self._eos = tuple(dict.fromkeys((*model.spec.eos_token_ids, *tokenizer.eos_ids)))
        self._scheduler = Scheduler(
            PagePool(total=pages, page_size=config.page_size),
            max_sequences=config.max_sequences,
            max_batch_tokens=config.max_batch_tokens,
            context=self.context,
        )
        self._runner = Runner(model, config, context=self.context, pages=pages)
        self._live: dict[str, _Live] = {}

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._live

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest, and queues nothing, if it can never be served."""
        if request.id in self._live:
            raise InvalidRequest(f"a request with the id {request.id!r} is running already")
        prompt, params = request.prompt_token_ids, request.params
        for what, ids in (
            ("prompt", prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            foreign = next((i for i in ids if i >= self._vocab_size), None)
            if foreign is not None:
                raise InvalidRequest(
                    f"{what} has token {foreign}; this model's tokens are 0 to "
                    f"{self._vocab_size - 1}"
                )
        sequence = Sequence(id=request.id, tokens=list(prompt), prompt_length=len(prompt))
        live = _Live(
            request=request,
            sequence=sequence,
            sampler=Sampler(params, prompt, self._eos, request_id=request.id),
            decoder=self._tokenizer.stream(),
            matcher=StopMatcher(params.stop),
        )
        self._scheduler.add(sequence)
        self._live[request.id] = live

    def cancel(self, request_id: str) -> Output | None:
        """End a request now. Returns its last output, or None if there is no such request."""
        live = self._live.get(request_id)
        if live is None:
            return None
        return self._finish(live, "cancelled", text=_flush(live))

    def step(self) -> list[Output]:
        """Compute one step; returns what it added to each request that got a token."""
        work = self._scheduler.schedule()
        if not work:
            return []
        now = time.monotonic()
        for item in work:
            live = self._live[item.sequence.id]
            if live.started is None:
                live.started, live.cached = now, item.sequence.reused
        logits = self._runner.run(work)
        self._scheduler.advance(work)
        sampled = [self._live[item.sequence.id] for item in work if item.logits]
        with _one_torch_thread():
            return [self._take(live, logits[row]) for row, live in enumerate(sampled)]

    def _take(self, live: _Live, logits: Tensor) -> Output:
        """Sample a sequence's next token and say what it means."""
        try:
            token, logprob = live.sampler.sample(logits)
        except MoestroError as error:
            return self._finish(live, "error", error=error)
        live.last = time.monotonic()
        live.first = live.first or live.last
        live.sequence.tokens.append(token)
        return self._emit(live, token, logprob)

    def _emit(self, live: _Live, token: int, logprob: TokenLogprob | None) -> Output:
        params, sequence = live.request.params, live.sequence
        count = len(sequence.tokens) - sequence.prompt_length
        ends = (*params.stop_token_ids, *(() if params.ignore_eos else self._eos))
        if token in ends and count > params.min_tokens:
            return self._finish(live, "stop", _flush(live), token, logprob, stop=token)
        text = live.matcher.push(live.decoder.push(token))
        if live.matcher.matched is not None:
            return self._finish(live, "stop", text, token, logprob, stop=live.matcher.matched)
        if count == params.max_tokens or len(sequence.tokens) == self.context:
            return self._finish(live, "length", text + _flush(live), token, logprob)
        return self._output(live, text, token, logprob)

    def _finish(
        self,
        live: _Live,
        reason: FinishReason,
        text: str = "",
        token: int | None = None,
        logprob: TokenLogprob | None = None,
        *,
        stop: str | int | None = None,
        error: MoestroError | None = None,
    ) -> Output:
        del self._live[live.request.id]
        self._scheduler.remove(live.sequence, keep=error is None)
        return self._output(live, text, token, logprob, reason=reason, stop=stop, error=error)

    def _output(
        self,
        live: _Live,
        text: str,
        token: int | None,
        logprob: TokenLogprob | None,
        *,
        reason: FinishReason | None = None,
        stop: str | int | None = None,
        error: MoestroError | None = None,
    ) -> Output:
        sequence = live.sequence
        return Output(
            request_id=live.request.id,
            text=text,
            token_ids=() if token is None else (token,),
            usage=Usage(
                prompt_tokens=sequence.prompt_length,
                completion_tokens=len(sequence.tokens) - sequence.prompt_length,
                cached_tokens=live.cached,
            ),
            logprobs=None if logprob is None else (logprob,),
            finished=reason is not None,
            finish_reason=reason,
            stop=stop,
            timings=_timings(live),
            error=error,
        )


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """A row of logits is little work, and torch's own threads go on spinning after it, on the cores
    that the kernels of the next step need.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _flush(live: _Live) -> str:
    """Text that was held back and is certain now that no token follows."""
    text = live.matcher.push(live.decoder.finish())
    return text if live.matcher.matched is not None else text + live.matcher.finish()


def _timings(live: _Live) -> Timings:
    start = live.request.arrival if live.started is None else live.started
    first = start if live.first is None else live.first
    last = first if live.last is None else live.last
    return Timings(queued=start - live.request.arrival, prefill=first - start, decode=last - first)

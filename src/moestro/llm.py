"""The Python face: ``LLM`` opens a model and answers, at once or as a stream."""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

from moestro.core.errors import InvalidRequest
from moestro.engine.config import EngineConfig
from moestro.engine.loading import Loaded, load_engine
from moestro.engine.request import Completion, Output, Request, SamplingParams
from moestro.memory.plan import Plan
from moestro.text import Tokenizer

Message = Mapping[str, Any]
#: text, token ids, or a conversation
Prompt = str | Sequence[int] | Sequence[Message]


class LLM:
    """A loaded model. Use it as a context manager, or ``close`` it.

    model: a directory or .safetensors/.gguf file, a packed directory, or a hub id. formats: one
    format for all matrices or ``role=format`` pairs; without it the checkpoint's own types are kept
    without loss. progress(done, total) counts bytes loaded. Engine options (context, max_sequences,
    threads, memory, ...) are the fields of ``EngineConfig``.

    Raises CheckpointError, UnsupportedFormat, UnsupportedArchitecture, OutOfBudget or
    InvalidRequest, each before weights are read. Methods may be called from several threads; one
    of them at a time drives the model, for all.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str = "cpu",
        formats: str | None = None,
        revision: str | None = None,
        offline: bool = False,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> None:
        config = EngineConfig.from_options(options)
        self._loaded: Loaded | None = load_engine(
            model,
            config,
            device=device,
            formats=formats,
            revision=revision,
            offline=offline,
            progress=progress,
        )
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._inbox: dict[str, deque[Output]] = {}

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete one prompt or several (texts or token ids), in their order.

        Raises InvalidRequest if any of them can never be served, before any is computed.
        """
        several = _as_list(prompts)
        chosen = _params_for(len(several), params)
        tokens = [self._tokens(prompt) for prompt in several]
        return self._complete(tokens, chosen)

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> Completion:
        """The answer to a conversation, ``[{"role": "user", "content": "..."}]``. ``template``
        goes to the chat template (tools, and what the model's own template knows).

        Raises InvalidRequest for a model without a chat template.
        """
        tokens = self._chat_tokens(messages, template)
        return self._complete([tokens], [params or SamplingParams()])[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **template: Any
    ) -> TextStream:
        """The answer as pieces of text while it is computed; ``prompt`` is a text, token ids or
        a conversation. ``completion()`` of the stream has the whole afterwards.
        """
        if _is_conversation(prompt):
            tokens = self._chat_tokens(cast(Sequence[Message], prompt), template)
        else:
            tokens = self._tokens(cast("str | Sequence[int]", prompt))
        request_id = self._add(tokens, params or SamplingParams())
        return TextStream(self, request_id)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._open.tokenizer

    @property
    def context(self) -> int:
        """Tokens a sequence may reach, prompt and answer together."""
        return self._open.engine.context

    @property
    def plan(self) -> Plan:
        """Where the memory goes."""
        return self._open.plan

    @property
    def loaded(self) -> Loaded:
        """The engine and the facts of how it was loaded."""
        return self._open

    def close(self) -> None:
        """Drop the model and its memory. Using it afterwards raises InvalidRequest."""
        with self._lock:
            self._loaded = None
            self._inbox.clear()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _open(self) -> Loaded:
        if self._loaded is None:
            raise InvalidRequest("this LLM is closed; make a new one")
        return self._loaded

    def _complete(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        ids: list[str] = []
        try:
            for tokens, chosen in zip(prompts, params, strict=True):
                ids.append(self._add(tokens, chosen))
            return [self._answer(request_id) for request_id in ids]
        except BaseException:
            # Whatever stops the caller (a refusal, Ctrl-C): nothing of it goes on computing.
            for request_id in ids:
                self._cancel(request_id)
            raise

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special=True)
        return list(prompt)

    def _chat_tokens(self, messages: Sequence[Message], template: Mapping[str, Any]) -> list[int]:
        text = self.tokenizer.render_chat(messages, **template)
        return self.tokenizer.encode(text)

    def _add(self, tokens: Sequence[int], params: SamplingParams) -> str:
        request_id = f"llm-{next(self._ids)}"
        request = Request(id=request_id, prompt_token_ids=tuple(tokens), params=params)
        with self._lock:
            self._open.engine.add(request)
            self._inbox[request_id] = deque()
        return request_id

    def _answer(self, request_id: str) -> Completion:
        """Drive the engine until a request is finished; raises the error that ended it, if any."""
        outputs: list[Output] = []
        while not (outputs and outputs[-1].finished):
            outputs += self._advance(request_id)
            if outputs and outputs[-1].error is not None:
                raise outputs[-1].error
        return Completion.join(outputs)

    def _advance(self, request_id: str) -> list[Output]:
        """A request's new outputs, after one step for all requests if there were none."""
        with self._lock:
            box = self._inbox.get(request_id)
            if box is None:
                raise InvalidRequest("this LLM was closed, or the request was cancelled")
            if not box:
                for output in self._open.engine.step():
                    if output.request_id in self._inbox:
                        self._inbox[output.request_id].append(output)
            outputs = list(box)
            box.clear()
            if outputs and outputs[-1].finished:
                del self._inbox[request_id]
            return outputs

    def _cancel(self, request_id: str) -> list[Output]:
        """End a request; returns the outputs nobody has taken yet. Harmless if it is not there."""
        with self._lock:
            outputs = list(self._inbox.pop(request_id, ()))
            last = None if self._loaded is None else self._loaded.engine.cancel(request_id)
            return outputs if last is None else [*outputs, last]


class TextStream(Iterator[str]):
    """Pieces of one answer's text, as they are computed.

    Leaving its ``with`` block, or ``close``, ends the request. ``cancel`` ends it before the next
    step and may be called from a signal handler or another thread. Raises the error that ended the
    request, if one did.
    """

    def __init__(self, llm: LLM, request_id: str) -> None:
        self._llm = llm
        self._id = request_id
        self._outputs: list[Output] = []
        self._cancelled = False

    def __next__(self) -> str:
        while not self._done:
            step = self._llm._cancel if self._cancelled else self._llm._advance
            new = step(self._id)
            self._outputs += new
            if self._outputs and self._outputs[-1].error is not None:
                raise self._outputs[-1].error
            text = "".join(output.text for output in new)
            if text:
                return text
            if self._cancelled:
                break
        raise StopIteration

    def cancel(self) -> None:
        """Stop before the next step; iteration then ends, with finish_reason "cancelled"."""
        self._cancelled = True

    def completion(self) -> Completion:
        """All that has come so far; after the last piece, the whole answer with its statistics.

        Raises InvalidRequest before the first token.
        """
        if not self._outputs:
            raise InvalidRequest("the answer has not begun; read the stream first")
        return Completion.join(self._outputs)

    def close(self) -> None:
        """End the request if it is running. What has come stays in ``completion()``."""
        if not self._done:
            self._outputs += self._llm._cancel(self._id)

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _done(self) -> bool:
        return bool(self._outputs) and self._outputs[-1].finished


def load(model: str | os.PathLike[str], **options: Any) -> LLM:
    """Open a model; the same as ``LLM(model, **options)``."""
    return LLM(model, **options)


def _is_conversation(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)


def _as_list(
    prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
) -> list[str | Sequence[int]]:
    """One prompt or several -> several. An empty list is no prompt at all."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]
    for item in items:
        ids = isinstance(item, Sequence) and all(isinstance(i, int) for i in item)
        if not isinstance(item, str) and not ids:
            raise InvalidRequest(
                f"a prompt must be text or a list of token ids, got {type(item).__name__}; for "
                "conversations use chat or stream"
            )
    return items


def _params_for(
    count: int, params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequest(
            f"{count} prompts but {len(params)} SamplingParams; give one, or one for each"
        )
    return list(params)

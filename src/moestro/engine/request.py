"""What a request asks for and what it gets back: sampling parameters, requests, outputs.

Each sampling knob is defined once, as a field of ``SamplingParams`` with its help text in the
field's metadata; the command line and the server read it from there.
"""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal

from moestro.core.errors import InvalidRequest, MoestroError

FinishReason = Literal["stop", "length", "cancelled", "error"]

#: most alternatives ``logprobs`` may ask for
MAX_LOGPROBS = 20
#: below this temperature the division overflows float32 long before it changes a token
GREEDY_BELOW = 1e-5


def _knob(default: Any, text: str, check: Callable[[str, Any], Any]) -> Any:
    return field(default=default, metadata={"help": text, "check": check})


def _refuse(name: str, value: object, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{name}={value!r} is not valid; {name} must be {wanted}")


def _number(low: float, high: float, *, low_open: bool = False) -> Callable[[str, Any], float]:
    bounds = f"{'above' if low_open else 'at least'} {low:g}"
    bounds += "" if math.isinf(high) else f" and at most {high:g}"

    def check(name: str, value: Any) -> float:
        wanted = f"a finite number, {bounds}"
        if isinstance(value, bool) or not isinstance(value, Real):
            raise _refuse(name, value, wanted)
        try:
            number = float(value)
        except OverflowError:
            raise _refuse(name, value, wanted) from None
        below = number <= low if low_open else number < low
        if not math.isfinite(number) or below or number > high:
            raise _refuse(name, value, wanted)
        return number

    return check


def _whole(low: int, high: int | None = None, *, optional: bool = False) -> Callable[..., Any]:
    wanted = f"a whole number, at least {low}" + (f" and at most {high}" if high else "")
    wanted += " (or None)" if optional else ""

    def check(name: str, value: Any) -> int | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise _refuse(name, value, wanted)
        number = int(value)
        if number < low or (high is not None and number > high):
            raise _refuse(name, value, wanted)
        return number

    return check


def _top_k(name: str, value: Any) -> int:
    return 0 if isinstance(value, Integral) and value == -1 else _whole(0)(name, value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, value, "True or False")
    return value


def _stop(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if texts is None:
        return ()
    if not isinstance(texts, Iterable) or isinstance(texts, (bytes, Mapping)):
        raise _refuse(name, value, "a string or a list of strings")
    texts = tuple(texts)
    if not all(isinstance(text, str) and text for text in texts):
        raise _refuse(name, value, "a non-empty string or a list of non-empty strings")
    return texts


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise _refuse(name, value, "a list of token ids")
    ids = tuple(value)
    if not all(isinstance(i, Integral) and not isinstance(i, bool) and int(i) >= 0 for i in ids):
        raise _refuse(name, value, "a list of token ids (whole numbers, at least 0)")
    return tuple(int(i) for i in ids)


def _logit_bias(name: str, value: Any) -> Mapping[int, float]:
    wanted = "a mapping of token id to a number from -100 to 100"
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _refuse(name, value, wanted)
    result: dict[int, float] = {}
    for key, bias in value.items():
        # JSON has only string keys, so the ids of an HTTP request arrive as text.
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
            raise _refuse(name, value, wanted)
        token = int(token)
        if token in result:
            raise InvalidRequest(f"{name} names token {token} twice; keep one of the two")
        result[token] = _number(-100, 100)(f"{name}[{token}]", bias)
    return result


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when a completion ends.

    Raises InvalidRequest naming the option for a wrong type, NaN, or a value out of range.
    ``stop`` also takes a lone string, ``stop_token_ids`` any list, ``top_k`` -1 for off.
    """

    temperature: float = _knob(
        1.0, "randomness; 0 always takes the likeliest token", _number(0, math.inf)
    )
    top_p: float = _knob(
        1.0,
        "sample from the fewest likeliest tokens whose probabilities sum to this; 1 is off",
        _number(0, 1, low_open=True),
    )
    top_k: int = _knob(0, "sample from this many likeliest tokens; 0 is off", _top_k)
    min_p: float = _knob(
        0.0, "drop tokens less likely than this part of the likeliest; 0 is off", _number(0, 1)
    )
    repetition_penalty: float = _knob(
        1.0,
        "above 1 makes tokens of the prompt and the answer less likely; 1 is off",
        _number(0, math.inf, low_open=True),
    )
    presence_penalty: float = _knob(
        0.0, "lower the logit of every token the answer already has by this", _number(-2, 2)
    )
    frequency_penalty: float = _knob(
        0.0, "lower the logit of a token by this each time the answer has it", _number(-2, 2)
    )
    logit_bias: Mapping[int, float] = field(
        default_factory=dict,
        metadata={"help": "token id -> number added to its logit", "check": _logit_bias},
    )
    seed: int | None = _knob(
        None,
        "same seed, same text; none draws a new one",
        _whole(-(2**63), 2**64 - 1, optional=True),
    )
    max_tokens: int | None = _knob(
        256, "most tokens to generate; none goes on until the context is full",
        _whole(1, optional=True),
    )  # fmt: skip
    min_tokens: int = _knob(0, "no end and no stop token before this many tokens", _whole(0))
    stop: tuple[str, ...] = _knob((), "end before any of these texts", _stop)
    stop_token_ids: tuple[int, ...] = _knob((), "end at any of these tokens", _token_ids)
    ignore_eos: bool = _knob(False, "do not end at the model's end-of-text tokens", _flag)
    logprobs: int | None = _knob(
        None,
        f"report log probabilities: of the token taken and of this many likeliest "
        f"(0 to {MAX_LOGPROBS})",
        _whole(0, MAX_LOGPROBS, optional=True),
    )

    def __post_init__(self) -> None:
        for knob in fields(self):
            value = knob.metadata["check"](knob.name, getattr(self, knob.name))
            object.__setattr__(self, knob.name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; "
                "lower min_tokens or raise max_tokens"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Parameters from untrusted names and values; InvalidRequest for an unknown name."""
        known = [knob.name for knob in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]}?" if near else "known: " + ", ".join(known)
                raise InvalidRequest(f"unknown sampling option {name!r}; {hint}")
        return cls(**options)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalized(self) -> bool:
        """Whether the choice depends on the tokens before it."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _prompt_ids(value: Sequence[int]) -> tuple[int, ...]:
    ids = _token_ids("prompt_token_ids", value)
    if not ids:
        raise InvalidRequest("the prompt has no tokens; give at least one")
    return ids


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to be completed. ``arrival`` is in seconds of ``time.monotonic()``.

    Raises InvalidRequest for an empty prompt.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", _prompt_ids(self.prompt_token_ids))


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Natural log probability of a token before temperature, penalties, bias and filters.

    ``top`` holds (token id, log probability) of the likeliest tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts of a request so far; ``cached_tokens`` of the prompt were not computed anew."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Where a request's time went, in seconds.

    queued: arrival to first scheduled. prefill: from then to the first token. decode: from the
    first token to the last.
    """

    queued: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0

    def decode_rate(self, completion_tokens: int) -> float:
        """Tokens per second after the first; 0 with fewer than two tokens."""
        return (completion_tokens - 1) / self.decode if self.decode > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Output:
    """What one engine step added to one request.

    ``text`` and ``token_ids`` are new since the last output; text may lag behind tokens while a
    character or a stop text is incomplete. ``logprobs`` matches ``token_ids`` if asked for.
    ``stop`` is the stop text or the token id that ended the request, ``error`` what failed.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] | None = None
    finished: bool = False
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    timings: Timings = field(default_factory=Timings)
    error: MoestroError | None = None


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A request's whole answer."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] | None = None
    stop: str | int | None = None
    timings: Timings = field(default_factory=Timings)

    @staticmethod
    def join(outputs: Iterable[Output]) -> Completion:
        """The sum of one request's outputs, in order. Raises ValueError when there are none."""
        parts = list(outputs)
        if not parts:
            raise ValueError("no outputs to join")
        last = parts[-1]
        logprobs = None
        if any(part.logprobs is not None for part in parts):
            logprobs = tuple(entry for part in parts for entry in part.logprobs or ())
        return Completion(
            request_id=last.request_id,
            text="".join(part.text for part in parts),
            token_ids=tuple(i for part in parts for i in part.token_ids),
            usage=last.usage,
            finish_reason=last.finish_reason,
            logprobs=logprobs,
            stop=last.stop,
            timings=last.timings,
        )

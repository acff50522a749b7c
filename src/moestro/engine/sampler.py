"""Chooses one request's next token from its logits.

The order, each step seeing what the one before it left:

1. repetition penalty, over tokens of the prompt and the answer;
2. frequency and presence penalty, over tokens of the answer;
3. logit bias; then end tokens are barred while ``min_tokens`` is not reached;
4. temperature (0: the highest logit wins, equal ones by lowest id, and the rest does not apply);
5. top_k, then top_p, then min_p;
6. one draw by inverse transform.

Log probabilities are of the logits as the model gave them, before step 1.

A request's draws are a function of its seed and of how many tokens it has, so its text does not
depend on what else is in the batch, nor on being preempted and resumed.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from moestro.core.errors import MoestroError
from moestro.engine.request import SamplingParams, TokenLogprob

#: how many of the likeliest tokens top_p looks at before it sorts the whole vocabulary
_NUCLEUS_TRY = 1024
#: how many neighbors share a maximum when the highest values are looked for
_CHUNK = 64
_MASK = 0xFFFFFFFF


class Sampler:
    """The sampling state of one request.

    ``end_ids`` end the answer (unless ``params.ignore_eos``) as ``params.stop_token_ids`` do; both
    are barred before ``min_tokens``. ``seed`` is what was asked for, else drawn at random here.
    Ids of the prompt and of ``params.logit_bias`` must lie within the logits given to ``sample``.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        end_ids: Sequence[int] = (),
        *,
        request_id: str | None = None,
    ) -> None:
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.generated = 0
        self._request_id = request_id
        self._history = _History(prompt_token_ids) if params.penalized else None
        self._barred = torch.tensor(sorted({*end_ids, *params.stop_token_ids}), dtype=torch.int64)
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)

    def sample(self, logits: Tensor) -> tuple[int, TokenLogprob | None]:
        """The next token for logits float32 [vocab_size], which are left as they are.

        It is taken into the history. Raises MoestroError for logits that are NaN or infinite.
        """
        adjusted = self._adjust(logits)
        best = int(adjusted.argmax())  # the first of equals, and of NaN
        self._check(logits, adjusted, best)
        token = best if self.params.greedy else self._draw(adjusted, float(adjusted[best]))
        logprob = self._logprob(logits, token)
        self.generated += 1
        if self._history is not None:
            self._history.add(token)
        return token, logprob

    def _adjust(self, logits: Tensor) -> Tensor:
        """Steps 1 to 3, on a copy if there is anything to do."""
        barring = self.generated < self.params.min_tokens and len(self._barred) > 0
        if self._history is None and not barring and len(self._bias) == 0:
            return logits
        logits = logits.clone()
        if self._history is not None:
            self._history.penalize(logits, self.params)
        if len(self._bias):
            logits[self._bias_ids] += self._bias
        if barring:
            # A tokenizer may name end tokens that the model has no logits for.
            logits[self._barred[self._barred < logits.numel()]] = -math.inf
        return logits

    def _check(self, logits: Tensor, adjusted: Tensor, best: int) -> None:
        if math.isfinite(adjusted[best]):
            return
        who = "this request" if self._request_id is None else f"request {self._request_id!r}"
        if adjusted[best] == -math.inf and bool((logits > -math.inf).any()):
            raise MoestroError(
                f"{who}: no token is left to choose; lower min_tokens or take away stop_token_ids"
            )
        broken = int((~torch.isfinite(logits)).sum())
        raise MoestroError(
            f"{who}: {broken} of {logits.numel()} logits are not finite after {self.generated} "
            "tokens; the weights or their format are damaged, check them with: moestro doctor"
        )

    def _draw(self, logits: Tensor, highest: float) -> int:
        """Steps 4 to 6."""
        params = self.params
        scaled = (logits - highest) / params.temperature
        ids: Tensor | None = None  # None: scaled is the whole vocabulary, in order
        if 0 < params.top_k < scaled.numel():
            ids = _top(scaled, params.top_k)
        if params.top_p < 1.0:
            ids = _nucleus(scaled, ids, params.top_p)
        weights = (scaled if ids is None else scaled[ids]).exp()
        if params.min_p > 0.0:
            weights = torch.where(weights >= params.min_p, weights, 0.0)  # the likeliest has 1
        index = _pick(weights, uniform(self.seed, self.generated))
        return index if ids is None else int(ids[index])

    def _logprob(self, logits: Tensor, token: int) -> TokenLogprob | None:
        count = self.params.logprobs
        if count is None:
            return None
        total = logits.logsumexp(0)
        ids = _top(logits, min(count, logits.numel()))
        values = (logits[ids] - total).tolist()
        return TokenLogprob(
            token_id=token,
            logprob=float(logits[token] - total),
            top=tuple(zip(ids.tolist(), values, strict=True)),
        )


class _History:
    """Which tokens a request has seen and how often its answer has each, as tensors that grow."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._place = {token: i for i, token in enumerate(dict.fromkeys(prompt_token_ids))}
        self._ids = torch.tensor(list(self._place), dtype=torch.int64)
        self._counts = torch.zeros(len(self._place))

    def add(self, token: int) -> None:
        """Count a token of the answer."""
        place = self._place.setdefault(token, len(self._place))
        if place >= len(self._ids):
            more = max(64, len(self._ids))
            self._ids = torch.cat([self._ids, self._ids.new_zeros(more)])
            self._counts = torch.cat([self._counts, self._counts.new_zeros(more)])
        self._ids[place] = token
        self._counts[place] += 1

    def penalize(self, logits: Tensor, params: SamplingParams) -> None:
        """In place. Repetition: positive logits divided by the penalty, negative ones multiplied
        (Keskar et al. 2019, arXiv:1909.05858, as transformers does it). Frequency and presence:
        logit - count * frequency - (count > 0) * presence, as in OpenAI's API.
        """
        used = len(self._place)
        ids, counts = self._ids[:used], self._counts[:used]
        values, penalty = logits[ids], params.repetition_penalty
        values = torch.where(values > 0, values / penalty, values * penalty)
        values -= counts * params.frequency_penalty + (counts > 0) * params.presence_penalty
        logits[ids] = values


def _top(values: Tensor, count: int) -> Tensor:
    """Ids of the ``count`` highest values, highest first, equal ones by lowest id."""
    chunks = values[: values.numel() // _CHUNK * _CHUNK].view(-1, _CHUNK).amax(1)
    if 0 < count <= chunks.numel():
        # As many chunks have a maximum this high, so at least as many values are this high: the
        # rest need not be sorted.
        floor = torch.topk(chunks, count, sorted=False).values.min()
        ids = torch.nonzero(values >= floor).flatten()
    else:
        ids = torch.arange(values.numel())
    order = torch.sort(values[ids], descending=True, stable=True).indices
    return ids[order[:count]]


def _nucleus(scaled: Tensor, ids: Tensor | None, top_p: float) -> Tensor:
    """The fewest likeliest of ``ids`` (None: of all) whose probabilities sum to ``top_p``."""
    if ids is not None:
        weights = scaled[ids].exp()
        return ids[: _reach(weights, top_p * float(weights.sum(dtype=torch.float64)))]
    goal = top_p * float(scaled.exp().sum(dtype=torch.float64))
    ids = _top(scaled, min(_NUCLEUS_TRY, scaled.numel()))
    needed = _reach(scaled[ids].exp(), goal)
    if needed == len(ids):
        ids = _top(scaled, scaled.numel())
        needed = _reach(scaled[ids].exp(), goal)
    return ids[:needed]


def _reach(weights: Tensor, goal: float) -> int:
    """How many leading weights it takes to sum to the goal; at least one, at most all."""
    sums = weights.cumsum(0, dtype=torch.float64)
    short = torch.searchsorted(sums, torch.tensor(goal, dtype=torch.float64))
    return min(int(short) + 1, len(weights))


def _pick(weights: Tensor, draw: float) -> int:
    """The index whose share of the summed weights holds ``draw`` in [0, 1); its weight is not 0."""
    sums = weights.cumsum(0, dtype=torch.float64)
    target = torch.tensor(draw * float(sums[-1]), dtype=torch.float64)
    index = int(torch.searchsorted(sums, target, right=True))
    # Rounding can put the target on the sum itself; the last weight above zero holds it.
    return index if index < len(weights) else int(torch.nonzero(weights)[-1])


def uniform(seed: int, index: int) -> float:
    """Number ``index`` of a seed's stream, uniform in [0, 1) with 53 bits."""
    words = philox(((index >> 32) & _MASK, index & _MASK, 0, 0), (seed & _MASK, seed >> 32 & _MASK))
    return ((words[0] << 32 | words[1]) >> 11) * 2.0**-53


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four random 32-bit words from a counter and a key (Salmon et al. 2011,
    "Parallel random numbers: as easy as 1, 2, 3", SC'11).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            product1 >> 32 ^ c1 ^ k0,
            product1 & _MASK,
            product0 >> 32 ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3

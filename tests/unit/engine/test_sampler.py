"""The sampler against a slow reading of its own rules, and what it promises about seeds."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moestro.core.errors import MoestroError
from moestro.engine.request import SamplingParams
from moestro.engine.sampler import Sampler, philox, uniform

#: more than one chunk of neighbors and a ragged end
VOCAB = 333


def random_logits(seed: int, size: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def slow_distribution(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Temperature, top_k, top_p and min_p in plain Python: token -> probability."""
    best = max(logits)
    weights = {i: math.exp((x - best) / params.temperature) for i, x in enumerate(logits)}
    kept = sorted(weights, key=lambda i: (-weights[i], i))
    if params.top_k:
        kept = kept[: params.top_k]
    if params.top_p < 1.0:
        goal, total, nucleus = params.top_p * sum(weights[i] for i in kept), 0.0, []
        for token in kept:
            nucleus.append(token)
            total += weights[token]
            if total >= goal:
                break
        kept = nucleus
    kept = [i for i in kept if weights[i] >= params.min_p * weights[kept[0]]]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


def draw(logits: torch.Tensor, params: SamplingParams, count: int) -> Counter[int]:
    sampler = Sampler(params)
    return Counter(sampler.sample(logits)[0] for _ in range(count))


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB},
    {"top_k": 10_000},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.2, "temperature": 1.3},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_draws_follow_the_distribution(options):
    logits = random_logits(11)
    params = SamplingParams(seed=5, **options)
    wanted = slow_distribution(logits.tolist(), params)
    count = 4000
    drawn = draw(logits, params, count)
    assert drawn.keys() <= wanted.keys()
    # Chi-square over tokens expected at least 5 times, the rest in one bin; 6 sigma.
    expected = {i: p * count for i, p in wanted.items()}
    bins = [(drawn[i], e) for i, e in expected.items() if e >= 5]
    bins.append((count - sum(d for d, _ in bins), count - sum(e for _, e in bins)))
    statistic = sum((d - e) ** 2 / e for d, e in bins if e > 1e-6)
    freedom = max(len(bins) - 1, 1)
    assert statistic < freedom + 6 * math.sqrt(2 * freedom)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_only_tokens_of_the_slow_reference_are_drawn(seed, temperature, top_k, top_p, min_p):
    # Halves, so that equal logits are common and the choice among them matters.
    logits = (random_logits(seed) * 2).round() / 2
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    assert draw(logits, params, 12).keys() <= slow_distribution(logits.tolist(), params).keys()


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_the_kept_tokens_are_those_transformers_keeps(options):
    logits = random_logits(4)[None]
    params = SamplingParams(**options)
    warpers = [TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    scores = logits
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.int64), scores)
    theirs = scores[0].softmax(0)
    ours = slow_distribution(logits[0].tolist(), params)
    assert set(theirs.nonzero().flatten().tolist()) == ours.keys()
    for token, probability in ours.items():
        assert float(theirs[token]) == pytest.approx(probability, rel=1e-4)


def test_a_flat_distribution_needs_more_than_the_first_look():
    logits = torch.zeros(5000)
    params = SamplingParams(top_p=0.5, seed=1)
    drawn = draw(logits, params, 300)
    assert max(drawn) < 2500
    assert max(drawn) > 2000  # beyond what is looked at first


def test_greedy_takes_the_highest_and_of_equals_the_lowest_id():
    logits = random_logits(1, size=150_001)
    logits[[149_000, 77_777, 90_000]] = 50.0
    sampler = Sampler(SamplingParams(temperature=0))
    before = logits.clone()
    assert sampler.sample(logits) == (77_777, None)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("size", [1, 2, 15, 64, 65, 1000])
def test_any_vocabulary_size_works(size):
    logits = random_logits(2, size=size)
    for options in ({"temperature": 0}, {"top_k": 3}, {"top_p": 0.5}, {"logprobs": 5}):
        token, _ = Sampler(SamplingParams(seed=1, **options)).sample(logits)
        assert 0 <= token < size


# --- penalties and bias -------------------------------------------------------------------------


def greedy_after(
    logits: torch.Tensor, prompt: list[int], answer: list[int], **options: object
) -> torch.Tensor:
    """The adjusted logits once an answer has been given, seen through a forced history."""
    sampler = Sampler(SamplingParams(temperature=0, **options), prompt)
    for token in answer:
        forced = torch.full_like(logits, -1000.0)
        forced[token] = 1000.0
        assert sampler.sample(forced)[0] == token
    return sampler._adjust(logits)


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=90),
    answer=st.lists(st.integers(0, VOCAB - 1), max_size=20),
    penalty=st.sampled_from([0.5, 1.1, 1.9]),
)
def test_repetition_penalty_is_that_of_transformers(prompt, answer, penalty):
    logits = random_logits(3)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + answer]), logits.clone()[None]
    )[0]
    ours = greedy_after(logits, prompt, answer, repetition_penalty=penalty)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_presence_and_frequency_count_the_answer_alone():
    logits = random_logits(3)
    prompt, answer = [1, 2, 2], [5, 2, 5, 5, *range(100, 180)]
    ours = greedy_after(logits, prompt, answer, presence_penalty=0.5, frequency_penalty=0.25)
    wanted = logits.clone()
    for token, count in Counter(answer).items():
        wanted[token] -= 0.5 + 0.25 * count
    torch.testing.assert_close(ours, wanted)


def test_bias_is_added_after_the_penalties():
    logits = torch.tensor([2.0, 1.0, -1.0])
    ours = greedy_after(logits, [0, 2], [], repetition_penalty=2.0, logit_bias={0: 3.0, 1: -1.0})
    assert ours.tolist() == [4.0, 0.0, -2.0]


def test_a_strong_bias_forces_or_forbids():
    logits = random_logits(8)
    best = int(logits.argmax())
    forced = Sampler(SamplingParams(temperature=0, logit_bias={42: 100}))
    assert forced.sample(logits)[0] == 42
    forbidden = SamplingParams(logit_bias={best: -100}, seed=0)
    assert best not in draw(logits, forbidden, 200)


def test_end_tokens_are_barred_until_min_tokens():
    logits = torch.tensor([9.0, 8.0, 7.0, 6.0])
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[1])
    sampler = Sampler(params, [3], end_ids=[0, 99])
    assert [sampler.sample(logits)[0] for _ in range(4)] == [2, 2, 0, 0]


def test_barring_every_token_is_an_error_that_says_so():
    sampler = Sampler(SamplingParams(min_tokens=1, stop_token_ids=[0, 1]), end_ids=[])
    with pytest.raises(MoestroError, match="no token is left"):
        sampler.sample(torch.tensor([1.0, 2.0]))


# --- seeds --------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others():
    steps = [random_logits(i) for i in range(40)]

    def run(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed, temperature=2.0))
        return [sampler.sample(logits)[0] for logits in steps]

    assert run(7) == run(7)
    assert run(7) != run(8)
    assert run(-1) != run(1)


def test_other_requests_in_between_change_nothing():
    steps = [random_logits(i) for i in range(20)]
    params = SamplingParams(seed=3, top_p=0.9, repetition_penalty=1.2)
    alone = Sampler(params, [1, 2])
    expected = [alone.sample(logits)[0] for logits in steps]
    crowd = [Sampler(SamplingParams(seed=i, top_k=i + 1)) for i in range(5)]
    among, found = Sampler(params, [1, 2]), []
    for logits in steps:
        batch = torch.stack([logits, *(random_logits(99 + i) for i in range(5))])
        found.append(among.sample(batch[0])[0])
        for row, other in enumerate(crowd, 1):
            other.sample(batch[row])
    assert found == expected


def test_without_a_seed_each_request_draws_its_own():
    seeds = {Sampler(SamplingParams()).seed for _ in range(20)}
    assert len(seeds) == 20


def test_philox_gives_its_published_answers():
    # Known-answer tests of the authors' Random123 library (kat_vectors, philox4x32 10).
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(pi, (0xA4093822, 0x299F31D0)) == (
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1,
    )  # fmt: skip


def test_draws_fill_the_unit_interval_evenly():
    draws = [uniform(12, i) for i in range(5000)]
    assert all(0.0 <= u < 1.0 for u in draws)
    tenths = Counter(int(u * 10) for u in draws)
    assert all(abs(tenths[i] - 500) < 6 * math.sqrt(500 * 0.9) for i in range(10))


# --- log probabilities --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_log_probabilities_are_of_the_raw_logits(count):
    logits = random_logits(6)
    params = SamplingParams(
        temperature=0.3, seed=1, logprobs=count, logit_bias={3: 50}, repetition_penalty=1.5
    )
    token, entry = Sampler(params, [1, 2, 3]).sample(logits)
    wanted = logits.double().log_softmax(0)
    assert entry is not None
    assert entry.token_id == token == 3
    assert entry.logprob == pytest.approx(float(wanted[3]), abs=1e-5)
    assert [i for i, _ in entry.top] == wanted.argsort(descending=True)[:count].tolist()
    for i, value in entry.top:
        assert value == pytest.approx(float(wanted[i]), abs=1e-5)


def test_more_log_probabilities_than_tokens():
    _, entry = Sampler(SamplingParams(logprobs=20)).sample(torch.tensor([1.0, 2.0]))
    assert entry is not None
    assert [i for i, _ in entry.top] == [1, 0]


# --- broken logits ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 2}, {"logit_bias": {1: 1}}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers_name_the_request(options, bad):
    logits = random_logits(1)
    logits[200] = bad
    sampler = Sampler(SamplingParams(**options), request_id="chat-9")
    with pytest.raises(MoestroError, match=r"'chat-9'.* 1 of 333 logits are not finite"):
        sampler.sample(logits)


def test_logits_all_minus_infinity_are_refused():
    with pytest.raises(MoestroError, match="4 of 4 logits"):
        Sampler(SamplingParams()).sample(torch.full((4,), -math.inf))


def test_single_minus_infinities_are_never_drawn():
    logits = torch.zeros(100)
    logits[::2] = -math.inf
    assert all(token % 2 for token in draw(logits, SamplingParams(seed=2), 300))

"""Sampling parameters refuse what cannot be meant; requests and outputs add up."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest

from moestro.core.errors import InvalidRequest
from moestro.engine.request import (
    Completion,
    Output,
    Request,
    SamplingParams,
    Timings,
    TokenLogprob,
    Usage,
)

NAN, INF = math.nan, math.inf

WRONG = {
    "temperature": [-0.1, NAN, INF, "1", None, True, 10**400],
    "top_p": [0, -0.5, 1.01, NAN, "0.9", None, True],
    "top_k": [-2, 1.5, "40", None, True, NAN],
    "min_p": [-0.1, 1.1, NAN, "0", None, False],
    "repetition_penalty": [0, -1, NAN, INF, "1.1", None],
    "presence_penalty": [-2.1, 2.1, NAN, "0", None, True],
    "frequency_penalty": [-2.1, 2.1, NAN, "0", None, True],
    "seed": [1.0, "7", 2**64, -(2**63) - 1, True],
    "max_tokens": [0, -1, 1.5, "5", True],
    "min_tokens": [-1, 1.5, "5", None, True],
    "stop": ["", ["a", ""], [1], b"a", 5, {"a": 1}, [None]],
    "stop_token_ids": [[-1], ["1"], "12", [1.0], [True], 5, {"1": 2}],
    "ignore_eos": [0, 1, "yes", None],
    "logprobs": [-1, 21, 1.5, "5", True],
    "logit_bias": [
        {1: 101}, {1: -101}, {1: NAN}, {1: "2"}, {-1: 1}, {"a": 1}, {"-1": 1}, {1.5: 1}, [1], "1",
        {True: 1}, {1: 1, "1": 2}, {"²": 1},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_wrong_value_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**{name: value})


def test_every_knob_has_wrong_values_tried_and_a_help_text():
    names = {knob.name for knob in fields(SamplingParams)}
    assert names == WRONG.keys()
    assert all(knob.metadata["help"] for knob in fields(SamplingParams))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"temperature": 0}, 0.0),
        ({"temperature": np.float32(0.5)}, 0.5),
        ({"top_k": -1}, 0),
        ({"top_k": np.int64(40)}, 40),
        ({"top_p": 1}, 1.0),
        ({"seed": 2**64 - 1}, 2**64 - 1),
        ({"max_tokens": None}, None),
        ({"stop": "###"}, ("###",)),
        ({"stop": ["a", "b"]}, ("a", "b")),
        ({"stop": None}, ()),
        ({"stop_token_ids": [np.int64(3), 4]}, (3, 4)),
        ({"logit_bias": {"17": -100, 4: 1}}, {17: -100.0, 4: 1.0}),
        ({"logit_bias": None}, {}),
        ({"logprobs": 0}, 0),
    ],
)
def test_what_is_meant_is_kept_in_one_form(given, kept):
    (name,) = given
    value = getattr(SamplingParams(**given), name)
    assert value == kept
    assert type(value) is type(kept)


def test_defaults_sample_from_the_whole_distribution():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert not params.greedy
    assert not params.penalized
    assert params.seed is None
    assert params.logprobs is None


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.1}, {"presence_penalty": 1}, {"frequency_penalty": -1}]
)
def test_each_penalty_counts_as_one(penalty):
    assert SamplingParams(**penalty).penalized


def test_greedy_is_temperature_zero_and_what_rounds_to_it():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-40).greedy
    assert not SamplingParams(temperature=0.01).greedy


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(InvalidRequest, match=r"'topk'.*top_k"):
        SamplingParams.from_options({"topk": 3})
    with pytest.raises(InvalidRequest, match=r"'beam_width'.*temperature"):
        SamplingParams.from_options({"beam_width": 3})
    assert SamplingParams.from_options({"top_k": 3, "seed": 1}) == SamplingParams(top_k=3, seed=1)


def test_min_tokens_must_fit_below_max_tokens():
    with pytest.raises(InvalidRequest, match=r"min_tokens=9.*max_tokens=8"):
        SamplingParams(min_tokens=9, max_tokens=8)
    assert SamplingParams(min_tokens=900, max_tokens=None).min_tokens == 900


def test_parameters_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = 2.0


def test_a_request_needs_a_prompt_of_token_ids():
    assert Request(id="a", prompt_token_ids=[5, 6]).prompt_token_ids == (5, 6)
    with pytest.raises(InvalidRequest, match="no tokens"):
        Request(id="a", prompt_token_ids=())
    with pytest.raises(InvalidRequest, match="prompt_token_ids"):
        Request(id="a", prompt_token_ids=(1, -1))


def test_requests_arrive_in_order():
    first = Request(id="a", prompt_token_ids=(1,))
    assert Request(id="b", prompt_token_ids=(1,)).arrival >= first.arrival


def outputs(logprobs: bool) -> list[Output]:
    entry = TokenLogprob(token_id=7, logprob=-0.5, top=((7, -0.5),))
    asked = (entry,) if logprobs else None
    usage = [Usage(prompt_tokens=3, completion_tokens=n, cached_tokens=2) for n in (1, 2)]
    return [
        Output(request_id="a", text="He", token_ids=(7,), usage=usage[0], logprobs=asked),
        Output(
            request_id="a",
            text="y",
            token_ids=(8,),
            usage=usage[1],
            logprobs=asked,
            finished=True,
            finish_reason="stop",
            stop="###",
            timings=Timings(queued=1.0, prefill=2.0, decode=0.5),
        ),
    ]


@pytest.mark.parametrize("logprobs", [False, True])
def test_outputs_join_to_a_completion(logprobs):
    whole = Completion.join(outputs(logprobs))
    assert (whole.text, whole.token_ids) == ("Hey", (7, 8))
    assert (whole.finish_reason, whole.stop) == ("stop", "###")
    assert whole.usage.total_tokens == 5
    assert whole.timings.decode_rate(whole.usage.completion_tokens) == pytest.approx(2.0)
    assert (whole.logprobs is None) != logprobs
    assert whole.logprobs is None or len(whole.logprobs) == 2


def test_nothing_joins_to_nothing():
    with pytest.raises(ValueError, match="no outputs"):
        Completion.join([])


def test_the_rate_of_one_token_is_zero():
    assert Timings().decode_rate(1) == 0.0

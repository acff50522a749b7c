"""The engine on a tiny random mixture: no answer depends on the company it is computed in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
from tiny_checkpoint import EOS, VOCAB

from moestro import SamplingParams, devices, models
from moestro.checkpoints import open_checkpoint
from moestro.core.errors import InvalidRequest, MoestroError, OutOfBudget
from moestro.devices.base import Device
from moestro.engine.config import EngineConfig
from moestro.engine.engine import Engine
from moestro.engine.loading import load_engine
from moestro.engine.request import Completion, Output, Request
from moestro.memory.loader import load_weights
from moestro.memory.policy import FormatPolicy
from moestro.text import Tokenizer, load_tokenizer

PAGE = 16
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["a", "Why is the sky blue?", "x" * 33, "One two three four five six seven eight nine"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module", params=["reference", "cpu"])
def device(request: pytest.FixtureRequest) -> Device:
    opened = devices.get(request.param)
    # Matrices this small take longer to hand out to threads than to multiply.
    opened.set_threads(1)
    return opened


@pytest.fixture(scope="module")
def parts(folder: Path, device: Device) -> tuple[models.Model, Tokenizer]:
    checkpoint = open_checkpoint(folder)
    description = models.describe(checkpoint)
    weights = load_weights(checkpoint, description.weights, policy=FormatPolicy.parse(""))
    tokenizer = load_tokenizer(checkpoint)
    checkpoint.close()
    return models.build(description, weights, device), tokenizer


def make(
    parts: tuple[models.Model, Tokenizer], *, pages: int | None = None, **options: Any
) -> Engine:
    config = EngineConfig.from_options(
        {"page_size": PAGE, "kv_dtype": "float32", "context": 96, **options}
    )
    return Engine(*parts, config, pages=pages)


def request(name: str, text: str, params: SamplingParams = GREEDY) -> Request:
    return Request(id=name, prompt_token_ids=tuple(text.encode()), params=params)


def drain(engine: Engine, found: dict[str, list[Output]] | None = None) -> dict[str, Completion]:
    found = {} if found is None else found
    for _ in range(500):
        if engine.idle:
            return {name: Completion.join(outputs) for name, outputs in found.items()}
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    raise AssertionError("the engine does not finish")


def answers(engine: Engine, params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    for index, text in enumerate(PROMPTS):
        engine.add(request(str(index), text, params))
    done = drain(engine)
    return [done[str(index)].token_ids for index in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def alone(parts: tuple[models.Model, Tokenizer]) -> list[tuple[int, ...]]:
    """Greedy answers, one request at a time, whole prompts in one step."""
    found = answers(make(parts, max_sequences=1))
    assert len(set(found)) == len(found)
    return found


@pytest.mark.parametrize(
    ("max_sequences", "max_batch_tokens"), [(4, 4), (2, 7), (3, 16), (4, 17), (4, 512)]
)
def test_batching_and_chunking_do_not_change_the_answers(
    parts: tuple[models.Model, Tokenizer],
    alone: list[tuple[int, ...]],
    max_sequences: int,
    max_batch_tokens: int,
) -> None:
    engine = make(parts, max_sequences=max_sequences, max_batch_tokens=max_batch_tokens)
    assert answers(engine) == alone


def test_seeded_sampling_does_not_depend_on_the_batch(
    parts: tuple[models.Model, Tokenizer],
) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=10, ignore_eos=True)
    first = answers(make(parts, max_sequences=1), params)
    assert answers(make(parts, max_sequences=4, max_batch_tokens=9), params) == first


def test_a_preempted_request_answers_as_if_it_had_not_been(
    parts: tuple[models.Model, Tokenizer],
) -> None:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=40, ignore_eos=True)
    prompts = {"old": "a" * 20, "young": "b" * 20, "youngest": "c" * 14}
    roomy, tight = make(parts), make(parts, pages=6)
    for engine in (roomy, tight):
        for name, text in prompts.items():
            engine.add(request(name, text, params))
    sequences = list(tight._scheduler)
    got, wanted = drain(tight), drain(roomy)
    assert sum(sequence.preemptions for sequence in sequences) > 0
    for name in prompts:
        assert got[name].token_ids == wanted[name].token_ids
        assert got[name].text == wanted[name].text
    tight._scheduler.drop_kept()
    assert tight._scheduler.pool.free == 6


@pytest.mark.parametrize("length", [1, 14, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("answer", [1, 2, 16])
def test_the_second_turn_reuses_the_first_and_says_the_same(
    parts: tuple[models.Model, Tokenizer], length: int, answer: int
) -> None:
    engine = make(parts, max_sequences=2, max_batch_tokens=16)
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    prompt = tuple(range(40, 40 + length))
    engine.add(Request(id="one", prompt_token_ids=prompt, params=params))
    turn = (*prompt, *drain(engine)["one"].token_ids)
    second = Request(id="two", prompt_token_ids=(*turn, 10, 11, 12), params=GREEDY)
    engine.add(second)
    reused = drain(engine)["two"]
    fresh = make(parts)
    fresh.add(second)
    assert reused.token_ids == drain(fresh)["two"].token_ids
    assert reused.usage.cached_tokens == len(turn) - 1


def test_cancel_ends_one_and_leaves_the_others(
    parts: tuple[models.Model, Tokenizer], alone: list[tuple[int, ...]]
) -> None:
    engine = make(parts, max_sequences=3)
    for index, text in enumerate(PROMPTS):
        engine.add(request(str(index), text))
    found: dict[str, list[Output]] = {}
    for _ in range(4):
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    running, waiting = engine.cancel("1"), engine.cancel("3")
    assert running is not None and waiting is not None
    assert running.finish_reason == waiting.finish_reason == "cancelled"
    assert running.usage.completion_tokens == 4
    assert waiting.usage.completion_tokens == 0
    assert engine.cancel("1") is None and engine.cancel("never") is None
    done = drain(engine, found)
    assert (done["0"].token_ids, done["2"].token_ids) == (alone[0], alone[2])
    engine._scheduler.drop_kept()
    assert engine._scheduler.pool.free == engine._scheduler.pool.total


def test_stop_texts_and_stop_tokens(parts: tuple[models.Model, Tokenizer]) -> None:
    engine = make(parts)
    engine.add(request("free", PROMPTS[1]))
    free = drain(engine)["free"]
    stop = free.text[4:6]
    at = free.text.index(stop)
    for name, options in (
        ("text", {"stop": ("never", stop)}),
        ("token", {"stop_token_ids": (free.token_ids[3],)}),
    ):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **options)
        engine.add(request(name, PROMPTS[1], params))
    done = drain(engine)
    assert done["text"].finish_reason == done["token"].finish_reason == "stop"
    assert (done["text"].text, done["text"].stop) == (free.text[:at], stop)
    first = free.token_ids.index(free.token_ids[3])
    assert done["token"].stop == free.token_ids[3]
    assert done["token"].token_ids == free.token_ids[: first + 1]
    assert done["token"].text == parts[1].decode(free.token_ids[:first])


def test_end_of_text_ends_unless_ignored(parts: tuple[models.Model, Tokenizer]) -> None:
    engine = make(parts)
    wants_eos = {EOS: 100.0}
    for name, ignore in (("ends", False), ("goes on", True)):
        params = SamplingParams(
            temperature=0, max_tokens=3, logit_bias=wants_eos, ignore_eos=ignore
        )
        engine.add(request(name, "ab", params))
    done = drain(engine)
    assert (done["ends"].finish_reason, done["ends"].stop) == ("stop", EOS)
    assert (done["ends"].text, done["ends"].token_ids) == ("", (EOS,))
    assert (done["goes on"].finish_reason, len(done["goes on"].token_ids)) == ("length", 3)


def test_without_a_limit_the_context_is_filled(parts: tuple[models.Model, Tokenizer]) -> None:
    engine = make(parts, context=40)
    engine.add(request("a", "abc", SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)))
    done = drain(engine)["a"]
    assert done.finish_reason == "length"
    assert done.usage.total_tokens == 40


def test_refusals_at_the_door_queue_nothing(parts: tuple[models.Model, Tokenizer]) -> None:
    engine = make(parts, context=40)
    with pytest.raises(InvalidRequest, match=r"40 tokens.*context holds 40"):
        engine.add(request("long", "x" * 40))
    with pytest.raises(InvalidRequest, match=f"{VOCAB}"):
        engine.add(Request(id="foreign", prompt_token_ids=(VOCAB,), params=GREEDY))
    with pytest.raises(InvalidRequest, match="no tokens"):
        request("empty", "")
    assert engine.idle and engine.step() == []
    engine.add(request("same", "a"))
    with pytest.raises(InvalidRequest, match="'same'"):
        engine.add(request("same", "b"))
    assert len(drain(engine)) == 1


def test_a_request_that_fails_ends_alone(
    parts: tuple[models.Model, Tokenizer], alone: list[tuple[int, ...]]
) -> None:
    class Broken:
        def sample(self, logits: object) -> None:
            raise InvalidRequest("no token is left")

    engine = make(parts, max_sequences=4)
    for index, text in enumerate(PROMPTS):
        engine.add(request(str(index), text))
    engine._live["2"].sampler = Broken()  # type: ignore[assignment]
    found: dict[str, list[Output]] = {}
    done = drain(engine, found)
    assert done["2"].finish_reason == "error"
    assert isinstance(found["2"][-1].error, MoestroError)
    assert [done[str(i)].token_ids for i in (0, 1, 3)] == [alone[i] for i in (0, 1, 3)]


def test_a_step_that_failed_can_be_tried_again(
    parts: tuple[models.Model, Tokenizer],
    alone: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make(parts, max_sequences=2)
    run, calls = engine._runner.run, iter(range(1000))

    def flaky(work: Any) -> Any:
        if next(calls) % 3 == 1:
            raise OutOfBudget("a passing shortage")
        return run(work)

    monkeypatch.setattr(engine._runner, "run", flaky)
    for index, text in enumerate(PROMPTS):
        engine.add(request(str(index), text))
    found: dict[str, list[Output]] = {}
    while not engine.idle:
        try:
            outputs = engine.step()
        except OutOfBudget:
            continue
        for output in outputs:
            found.setdefault(output.request_id, []).append(output)
    for index, wanted in enumerate(alone):
        assert Completion.join(found[str(index)]).token_ids == wanted


def test_logprobs_usage_and_timings(parts: tuple[models.Model, Tokenizer]) -> None:
    engine = make(parts)
    engine.add(request("a", "abc", SamplingParams(temperature=0, max_tokens=4, logprobs=2)))
    done = drain(engine)["a"]
    assert done.logprobs is not None
    assert [entry.token_id for entry in done.logprobs] == list(done.token_ids)
    assert all(entry.top[0] == (entry.token_id, entry.logprob) for entry in done.logprobs)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 4)
    assert done.timings.prefill > 0 and done.timings.decode > 0 and done.timings.queued >= 0


def test_too_few_pages_for_one_sequence_are_refused(
    parts: tuple[models.Model, Tokenizer],
) -> None:
    with pytest.raises(InvalidRequest, match=r"5 KV pages.*96"):
        make(parts, pages=5)


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_the_plan_covers_what_is_allocated(tmp_path: Path, family: str, device: Device) -> None:
    model = tiny_checkpoint.write(tmp_path / family, family=family)
    totals: list[tuple[int, int]] = []
    loaded = load_engine(
        model,
        EngineConfig(max_batch_tokens=64, threads=1),
        device=device.name,
        progress=lambda done, total: totals.append((done, total)),
    )
    runner, plan = loaded.engine._runner, loaded.plan.ram
    caches = [t for layer in runner._cache for t in (layer.k, layer.v)]
    assert sum(t.numel() * t.element_size() for t in caches) == plan.kv
    assert runner._buffers.nbytes <= plan.buffers
    assert totals[0][0] == 0 and totals[-1][0] == totals[-1][1] > 0
    assert [done for done, _ in totals] == sorted(done for done, _ in totals)

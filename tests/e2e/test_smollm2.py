"""Real text: SmolLM2-135M-Instruct from its GGUF file against transformers.

Two regimes. With every matrix in float32, logits and greedy text equal transformers' up to float
rounding. With the file's own 4-bit and 8-bit weights the integer kernels round activations to 8
bits per 32 channels. Rounding is chaotic: a last-bit difference flips a code, and after some layers
two runs that round alike differ by as much as each differs from float32. So the bounds are
statistical and measured in the same run: transformers with the same rounding in front of each
linear layer shows what the rounding costs, and the kernels may not cost noticeably more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import model_logits
import pytest
import smollm2
import torch
from torch import Tensor

from moestro import LLM, SamplingParams
from moestro.checkpoints import open_checkpoint
from moestro.text import Tokenizer, load_tokenizer

ANSWER = 64
#: logits may differ by this part of the largest logit when all arithmetic is float32
FLOAT32 = 1e-4
#: two draws of the same rounding noise over some hundred tokens differ by less than this factor
SAMPLING = 1.5
#: sequences whose full logits are compared
COMPARED = 6


@dataclass(frozen=True)
class Answer:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def all(self) -> list[int]:
        return [*self.prompt, *self.tokens]


@dataclass(frozen=True)
class Difference:
    """Where greedy decoding would have gone another way: the oracle's best token and ours."""

    question: str
    step: int
    best: int
    ours: int
    gap: float

    def __str__(self) -> str:
        return (
            f"{self.question!r} step {self.step}: the oracle takes {self.best}, Moestro takes "
            f"{self.ours}, which the oracle puts {self.gap:.4f} lower"
        )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2.gguf_path()))


@pytest.fixture(scope="module")
def oracle():
    return smollm2.oracle()


@pytest.fixture(scope="module")
def rounded_oracle():
    return smollm2.with_rounded_activations(smollm2.oracle())


def logits(model, ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([list(ids)])).logits[0]


def greedy_answers(tokenizer: Tokenizer, formats: str | None) -> list[Answer]:
    """All questions at once through the engine: prefill in chunks, ragged decode."""
    prompts = [tuple(tokenizer.encode(smollm2.chat_prompt(q))) for q in smollm2.TOPICS]
    params = SamplingParams(temperature=0, max_tokens=ANSWER)
    options = {"max_sequences": len(prompts), "kv_dtype": "float32", "context": 256}
    with LLM(smollm2.gguf_path(), formats=formats, **options) as llm:
        answers = llm.generate(prompts, params)
    return [Answer(p, a.token_ids) for p, a in zip(prompts, answers, strict=True)]


def differences(model, answers: list[Answer]) -> tuple[list[Difference], float]:
    """Every step at which ``model`` would not have taken our token, and the largest logit.

    The model reads our own answer, so the steps after a difference are judged as well.
    """
    found, largest = [], 0.0
    for question, answer in zip(smollm2.TOPICS, answers, strict=True):
        rows = logits(model, answer.all)[len(answer.prompt) - 1 : -1]
        largest = max(largest, rows.abs().max().item())
        ours = torch.tensor(answer.tokens)
        gaps = rows.max(-1).values - rows.gather(1, ours[:, None])[:, 0]
        for step in (gaps > 0).nonzero().flatten().tolist():
            best = int(rows[step].argmax())
            found.append(Difference(question, step, best, int(ours[step]), gaps[step].item()))
    return found, largest


def check_lengths(answers: list[Answer], tokenizer: Tokenizer) -> None:
    for answer in answers:
        ended = answer.tokens[-1] in tokenizer.eos_ids
        assert ended or len(answer.tokens) == ANSWER


def kl(reference: Tensor, other: Tensor) -> Tensor:
    """Kullback-Leibler divergence of each row in nats."""
    p, q = reference.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def test_the_tokenizer_reads_the_prompt(tokenizer):
    ids = tokenizer.encode(smollm2.chat_prompt(smollm2.TOPICS[0]))
    assert ids[:5] == [1, 9690, 198, 2683, 359]
    assert tokenizer.decode(ids, skip_special=False) == smollm2.chat_prompt(smollm2.TOPICS[0])


def test_float32_logits_equal_transformers(tokenizer, oracle):
    model = model_logits.load(smollm2.gguf_path(), device="cpu", formats="f32")
    for question in smollm2.TOPICS[:COMPARED]:
        ids = tokenizer.encode(smollm2.chat_prompt(question))
        expected = logits(oracle, ids)
        error = (model_logits.sequence_logits(model, ids) - expected).abs().max()
        assert error <= FLOAT32 * expected.abs().max(), question


def test_float32_greedy_text_equals_transformers(tokenizer, oracle, record_property):
    answers = greedy_answers(tokenizer, "f32")
    check_lengths(answers, tokenizer)
    found, largest = differences(oracle, answers)
    record_property("differences", [str(d) for d in found])
    print(f"{len(found)} differences", *found, sep="\n")
    # Both candidates may be off by the bound on logits; within twice that, they are a tie.
    for difference in found:
        assert difference.gap <= 2 * FLOAT32 * largest, str(difference)


def test_integer_logits_cost_what_the_rounding_costs(tokenizer, oracle, rounded_oracle):
    model = model_logits.load(smollm2.gguf_path(), device="cpu")
    ours, rounding = [], []
    for question in smollm2.TOPICS[:COMPARED]:
        ids = tokenizer.encode(smollm2.chat_prompt(question))
        expected = logits(oracle, ids)
        ours.append(kl(expected, model_logits.sequence_logits(model, ids)))
        rounding.append(kl(expected, logits(rounded_oracle, ids)))
    cost, price = torch.cat(ours).mean().item(), torch.cat(rounding).mean().item()
    print(f"mean KL to float32: Moestro {cost:.2e}, rounding in transformers {price:.2e}")
    assert cost <= SAMPLING * price
    assert price <= 0.01  # or the yardstick itself is broken


def test_an_int8_cache_costs_little(tokenizer):
    """Against the same weights with a float32 cache: far less than what 4-bit weights cost."""
    model = model_logits.load(smollm2.gguf_path(), device="cpu", formats="f32")
    cost, flips, steps = [], 0, 0
    for question in smollm2.TOPICS[:COMPARED]:
        ids = tokenizer.encode(smollm2.chat_prompt(question))
        exact = model_logits.sequence_logits(model, ids)
        coarse = model_logits.sequence_logits(model, ids, torch.int8)
        cost.append(kl(exact, coarse))
        flips += int((exact.argmax(-1) != coarse.argmax(-1)).sum())
        steps += len(ids)
    mean = torch.cat(cost).mean().item()
    print(f"mean KL of an int8 cache {mean:.2e}, {flips} of {steps} leading tokens differ")
    assert 0 < mean <= 3e-3
    assert flips <= 0.06 * steps


def test_integer_greedy_text_differs_only_at_near_ties(tokenizer, oracle, rounded_oracle):
    answers = greedy_answers(tokenizer, None)
    check_lengths(answers, tokenizer)
    found, _ = differences(oracle, answers)
    # What the rounding does in transformers at the same steps: how often another token leads, and
    # by how much the margin between the two leading tokens moves.
    steps, flips, moved = 0, 0, 0.0
    for answer in answers:
        exact = logits(oracle, answer.all)[len(answer.prompt) - 1 : -1]
        rounded = logits(rounded_oracle, answer.all)[len(answer.prompt) - 1 : -1]
        leading = exact.topk(2).indices
        change = exact.gather(1, leading).diff() - rounded.gather(1, leading).diff()
        moved = max(moved, change.abs().max().item())
        flips += int((exact.argmax(-1) != rounded.argmax(-1)).sum())
        steps += len(answer.tokens)
    print(f"{len(found)} of {steps} tokens differ ({flips} by rounding in transformers)")
    print(*found, sep="\n")
    for difference in found:
        assert difference.gap <= moved, f"{difference}; rounding moves margins by {moved:.3f}"
    assert len(found) <= SAMPLING * flips

"""Converted models whose experts do not fit: the same tokens and numbers as from memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint

from moestro import LLM, SamplingParams, models
from moestro.checkpoints import open_checkpoint
from moestro.checkpoints.packed import read_manifest
from moestro.core.errors import OutOfBudget, StorageError
from moestro.engine.request import Completion
from moestro.memory.convert import convert
from moestro.memory.policy import FormatPolicy

OPTIONS: dict[str, Any] = {
    "threads": 2, "context": 128, "max_sequences": 3, "max_batch_tokens": 32
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5)
#: several lengths, so that prompts and answers share steps
PROMPTS = ["a", "some longer text, of more tokens than a step computes", "abcdef", "xy" * 11]


def packed(folder: Path, family: str) -> Path:
    source = tiny_checkpoint.write(folder / "source", family=family)
    with open_checkpoint(source) as checkpoint:
        specs = models.describe(checkpoint).weights
        policy = FormatPolicy.parse("experts=int4-g32,attention=int8-g32")
        convert(checkpoint, specs, folder / "packed", policy=policy, progress=None)
    return folder / "packed"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(tmp_path_factory.mktemp("streamed"), "qwen3_moe")


def part_of(model: Path, part: float) -> str:
    """A budget for everything but this part of the experts, with KV for one sequence."""
    with LLM(model, **OPTIONS) as llm:
        plan = llm.plan
    entries = read_manifest(model).entries.values()
    experts = sum(e.info.nbytes for e in entries if e.kind == "experts" and e.shape[0] > 1)
    sequence = -(-plan.context // plan.page_size) * plan.page_nbytes
    ram = plan.ram
    return f"{ram.weights + ram.experts + ram.buffers + sequence - int(part * experts)}B"


def said(answers: list[Completion]) -> list[tuple[Any, ...]]:
    """Tokens, and the log probabilities of the best of each place."""
    return [(answer.token_ids, answer.logprobs) for answer in answers]


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "deepseek_v2"])
def test_same_tokens_and_numbers_as_from_memory(family: str, tmp_path: Path) -> None:
    folder = packed(tmp_path, family)
    with LLM(folder, **OPTIONS) as whole:
        assert whole.loaded.streaming is None
        expected = said(whole.generate(PROMPTS, PARAMS))
    for part in (0.4, 0.6):
        with LLM(folder, memory=part_of(folder, part), **OPTIONS) as llm:
            assert llm.loaded.streaming is not None
            assert llm.plan.ram.total <= llm.plan.ram.budget
            assert said(llm.generate(PROMPTS, PARAMS)) == expected
            stats = llm.loaded.streaming.stats()
            assert 0 < stats.slots < stats.experts
            assert stats.hits > 0 and stats.misses > 0 and stats.decode_misses > 0
            blob = llm.loaded.streaming.banks[0].layout.nbytes
            assert stats.nbytes == stats.misses * blob


def test_the_reference_reads_the_same_experts(model: Path) -> None:
    few = SamplingParams(temperature=0, max_tokens=3, logprobs=5)
    found = []
    for part in (0.0, 0.5):
        budget = part_of(model, part)
        with LLM(model, device="reference", memory=budget, **OPTIONS) as llm:
            assert (llm.loaded.streaming is None) == (part == 0)
            found.append(said(llm.generate(PROMPTS[:1], few)))
    assert found[0] == found[1]


def test_an_accelerator_wants_the_others_in_memory(model: Path) -> None:
    with pytest.raises(OutOfBudget, match="emulated does not read experts from disk"):
        LLM(model, device="emulated", memory=part_of(model, 0.5), **OPTIONS)


def test_what_fits_stays_in_memory(model: Path) -> None:
    with LLM(model, memory=part_of(model, 0), **OPTIONS) as llm:
        assert llm.loaded.streaming is None


def test_even_one_expert_per_layer_may_be_too_much(model: Path) -> None:
    with pytest.raises(OutOfBudget, match="missing"):
        LLM(model, memory=part_of(model, 1), **OPTIONS)


def test_a_model_that_is_not_converted_is_refused_with_what_to_do(tmp_path: Path) -> None:
    source = tiny_checkpoint.write(tmp_path / "source")
    with pytest.raises(OutOfBudget, match="moestro convert MODEL OUT"):
        LLM(source, memory="300KiB", **OPTIONS)
    dense = tiny_checkpoint.write(tmp_path / "dense", family="llama")
    with pytest.raises(OutOfBudget) as refusal:
        LLM(dense, memory="300KiB", **OPTIONS)
    assert "moestro convert" not in str(refusal.value)


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_file_is_an_error_of_the_request(
    model: Path, tmp_path: Path, damage: str
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    with LLM(copy, memory=part_of(copy, 0.6), **OPTIONS) as llm:
        before = llm.generate(PROMPTS[:1], PARAMS)[0]
        files = sorted(copy.glob("experts-*.bin"))
        for path in files:
            if damage == "cut":
                os.truncate(path, 4096)
            else:
                path.write_bytes(bytes(path.stat().st_size))
        for _ in range(2):
            with pytest.raises(StorageError, match=r"experts-0\d\d\.bin"):
                llm.generate(PROMPTS, PARAMS)
            assert llm.loaded.engine.idle
    assert before.usage.completion_tokens == PARAMS.max_tokens


def test_a_replaced_file_goes_on_being_read(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    with LLM(copy, memory=part_of(copy, 0.6), **OPTIONS) as llm:
        expected = said(llm.generate(PROMPTS, PARAMS))
        for path in copy.glob("experts-*.bin"):
            (tmp_path / "other").write_bytes(bytes(path.stat().st_size))
            os.replace(tmp_path / "other", path)
        assert said(llm.generate(PROMPTS, PARAMS)) == expected

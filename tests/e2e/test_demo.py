"""The demo's whole path: upcycle, convert, load, answer; and what noise 0 must give."""

from __future__ import annotations

import json

import model_logits
import pytest
import smollm2
import torch
from typer.testing import CliRunner

from moestro import LLM, SamplingParams, models
from moestro.checkpoints import open_checkpoint
from moestro.cli.main import app
from moestro.memory.convert import convert
from moestro.memory.policy import FormatPolicy
from moestro.models.upcycle import Recipe, demo_source, upcycle

#: as in test_smollm2: float32 arithmetic, relative to the largest logit
FLOAT32 = 1e-4


@pytest.fixture(scope="module")
def equal_experts(tmp_path_factory):
    """The mixture without noise, as safetensors and packed, both in float32."""
    folder = tmp_path_factory.mktemp("demo")
    source = open_checkpoint(demo_source())
    recipe = Recipe(noise=0.0, dtype=torch.float32)
    upcycle(source, models.describe(source), folder / "mixture", recipe)
    mixture = open_checkpoint(folder / "mixture")
    policy = FormatPolicy.parse("f32")
    convert(mixture, models.describe(mixture).weights, folder / "packed", policy=policy)
    return folder


@pytest.mark.parametrize("container", ["mixture", "packed"])
def test_without_noise_the_mixture_equals_the_dense_model(equal_experts, container):
    mixture = model_logits.load(equal_experts / container, device="cpu", formats="f32")
    dense = model_logits.load(smollm2.gguf_path(), device="cpu", formats="f32")
    assert mixture.spec.model_type == "mixtral"
    with LLM(smollm2.gguf_path(), context=64) as llm:
        ids = llm.tokenizer.encode(smollm2.chat_prompt("Why is the sky blue?"))
    expected = model_logits.sequence_logits(dense, ids)
    error = (model_logits.sequence_logits(mixture, ids) - expected).abs().max()
    assert error <= FLOAT32 * expected.abs().max()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def run(cache, *arguments: str):
    return CliRunner().invoke(app, arguments, env={"MOESTRO_CACHE": str(cache)})


def test_the_demo_command_builds_and_answers(cache):
    result = run(cache, "demo", "--ask", "What is the capital of France?", "--max-tokens", "24")
    assert result.exit_code == 0, result.output
    assert "not a trained MoE" in result.stderr
    assert "Paris" in result.stdout
    folder = cache / "models/demo"
    assert json.loads((folder / "demo.json").read_text())["noise"] == 0.1
    assert [p.name for p in folder.parent.iterdir()] == ["demo"]


def test_a_second_run_finds_the_model(cache):
    before = (cache / "models/demo/moestro.json").stat().st_mtime_ns
    result = run(cache, "demo", "--max-tokens", "2")
    assert result.exit_code == 0, result.output
    assert (cache / "models/demo/moestro.json").stat().st_mtime_ns == before


def test_the_demo_is_a_model_like_any_other(cache):
    with LLM(cache / "models/demo", context=128) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=24))
    assert "Paris" in answer.text
    result = run(cache, "run", "demo", "The capital of France is", "--max-tokens", "4")
    assert result.exit_code == 0, result.output


def test_bad_options_build_nothing(tmp_path):
    for arguments in (["--noise", "-1"], ["--format", "int3"], ["--ask", " "]):
        result = run(tmp_path, "demo", *arguments)
        assert result.exit_code != 0
        assert not (tmp_path / "models").exists()


def test_an_unwritable_cache_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    result = run(blocked, "demo")
    assert result.exit_code != 0
    assert str(blocked) in str(result.exception) + result.output

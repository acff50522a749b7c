"""The engine on an accelerator beside the CPU: options to placement, budget to experts."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint

from moestro import LLM, SamplingParams, devices
from moestro.core.errors import InvalidRequest, OutOfBudget
from moestro.devices.base import Accelerator
from moestro.memory.hybrid_bank import Crossing

PROMPTS = ["a", "Why is the sky blue?", "x" * 40]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "formats": "int4-g32", "threads": 1, "context": 128, "max_batch_tokens": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("tiny") / "model", family="qwen2_moe")


@pytest.fixture
def memory() -> Any:
    device = devices.get("emulated")
    assert isinstance(device, Accelerator)
    gc.collect()
    assert device.memory.held == {}, "another test has left something"
    return device.memory


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]


def counts(llm: LLM) -> dict[int, int]:
    placement = llm.loaded.placement
    assert placement is not None
    return placement.counts("accelerator")


def test_answers_do_not_depend_on_where_experts_are(folder: Path, memory: Any) -> None:
    with LLM(folder, **OPTIONS) as llm:
        expected = answers(llm)
        assert llm.loaded.placement is None
    with LLM(folder, device="emulated", **OPTIONS) as llm:
        assert answers(llm) == expected
        sizes = {layer.layer: layer.num_experts for layer in llm.loaded.placement.layers}
        assert counts(llm) == sizes, "all of them, where nothing limits it"
        config, spec = llm.loaded.description.config, llm.loaded.description.spec
        # With the results that would cross, of chosen experts and the shared one.
        whole = sum(memory.held.values())
        whole += Crossing.nbytes(16, config.top_k + 1, spec.hidden_size)
        experts = memory.held["experts"]
        assert llm.loaded.placement.nbytes("accelerator") == experts
    gc.collect()
    assert memory.held == {}
    several: dict[str, Any] = {
        "none": {"expert_pins": ("layers.*.experts=ram",)},
        "half": {"accelerator_memory": f"{whole - experts // 2}B"},
        "front": {"accelerator_memory": f"{whole - experts // 2}B", "placement": "front"},
        "random": {"accelerator_memory": f"{whole - experts // 3}B", "placement": "random"},
        "pinned": {"expert_pins": ["layers.0.experts.0-1=ram"]},
    }
    placed = {}
    for name, options in several.items():
        with LLM(folder, device="emulated", **OPTIONS, **options) as llm:
            assert answers(llm) == expected, name
            placed[name] = counts(llm)
            assert memory.held.get("experts", 0) == llm.loaded.placement.nbytes("accelerator")
            if memory.budget is not None:
                assert sum(memory.held.values()) <= memory.budget
        gc.collect()
    assert set(placed["none"].values()) == {0}
    assert 0 < sum(placed["half"].values()) < sum(sizes.values())
    assert max(placed["half"].values()) - min(placed["half"].values()) <= 1
    assert placed["front"][min(sizes)] == sizes[min(sizes)]
    assert sum(placed["pinned"].values()) == sum(sizes.values()) - 2


def test_what_does_not_fit_the_accelerator_is_named(folder: Path, memory: Any) -> None:
    with pytest.raises(OutOfBudget, match=r"dense weights take .* of accelerator memory"):
        LLM(folder, device="emulated", accelerator_memory="1KiB", **OPTIONS)
    gc.collect()
    assert memory.held == {}


def test_options_of_an_accelerator_are_refused_elsewhere(folder: Path) -> None:
    for options in (
        {"accelerator_memory": "1GiB"},
        {"placement": "front"},
        {"expert_pins": ("layers.0.experts=ram",)},
    ):
        with pytest.raises(InvalidRequest, match=f"{next(iter(options))} is for a device with"):
            LLM(folder, **OPTIONS, **options)
    with pytest.raises(InvalidRequest, match="selects no expert"):
        LLM(folder, device="emulated", expert_pins=["layers.99.experts=ram"], **OPTIONS)

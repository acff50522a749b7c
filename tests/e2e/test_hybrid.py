"""Experts on an accelerator and in RAM, in one step: the logits of the CPU alone, bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_checkpoint
import tiny_models
import torch
from torch import Tensor

from moestro import devices, models
from moestro.checkpoints import open_checkpoint
from moestro.core.errors import InvalidRequest, OutOfBudget
from moestro.devices.base import Device
from moestro.devices.emulated import EmulatedDevice
from moestro.devices.emulated.memory import EmulatedMemory
from moestro.devices.emulated.ops import EmulatedOps
from moestro.engine.shape import is_routed
from moestro.memory.hybrid_bank import HybridBank, place_experts
from moestro.memory.loader import Weights, load_weights
from moestro.memory.policy import FormatPolicy
from moestro.models import ModelDescription
from moestro.ops.contracts import Batch

TOKENS, PAGE = 24, 16
#: lengths of consecutive chunks of the same two sequences; single tokens are decode steps
CHUNKS = ((1, 1), (5, 0), (16, 8), (1, 1), (0, 1), (7, 17), (1, 1))
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss")


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A tiny model on disk, and its logits on the cpu device."""

    folder: Path
    formats: str
    description: ModelDescription
    expected: list[Tensor]

    def load(self) -> Weights:
        checkpoint = open_checkpoint(self.folder)
        policy = FormatPolicy.parse(self.formats)
        weights = load_weights(checkpoint, self.description.weights, policy=policy)
        checkpoint.close()
        return weights

    @property
    def layers(self) -> dict[str, int]:
        """key -> layer of the routed experts."""
        specs = self.description.weights
        return {s.key: s.layer for s in specs if is_routed(s)}

    @property
    def num_experts(self) -> int:
        return next(s.shape[0] for s in self.description.weights if s.key in self.layers)


def make(folder: Path, family: str, formats: str) -> Tiny:
    if family == "gpt_oss":  # experts with biases, in tensors of another shape
        tiny_models.write_safetensors(tiny_models.make(family), folder)
    else:
        tiny_checkpoint.write(folder, family=family)
    checkpoint = open_checkpoint(folder)
    description = models.describe(checkpoint)
    checkpoint.close()
    tiny = Tiny(folder=folder, formats=formats, description=description, expected=[])
    device = devices.get("cpu")
    device.set_threads(2)
    tiny.expected.extend(logits_of(tiny, tiny.load(), device))
    return tiny


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make(tmp_path_factory.mktemp("tiny") / "model", request.param, "int4-g32")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make(
        tmp_path_factory.mktemp("mixed") / "model", "qwen2_moe", "experts=k4,shared=int8-g32"
    )


def logits_of(tiny: Tiny, weights: Weights, device: Device, capacity: int = TOKENS) -> list[Tensor]:
    """Logits of the last token of both sequences after each of ``CHUNKS``, from one recording."""
    model = models.build(tiny.description, weights, device, max_positions=128)
    pages = 128 // PAGE
    batch = Batch.allocate(tokens=capacity, slots=2, pages_per_slot=pages, logits=2)
    batch.page_table.copy_(torch.arange(2 * pages).view(2, pages))
    cache = model.allocate_cache(pages=2 * pages, page_size=PAGE, dtype=torch.float16)
    buffers = model.allocate_buffers(tokens=capacity, logits=2)
    with device.ops.record() as program:
        model.forward(batch, cache, buffers)
    vocab = min(256, tiny.description.spec.vocab_size)
    generator = torch.Generator().manual_seed(5)
    lengths, found = [0, 0], []
    for chunk in CHUNKS:
        row, last = 0, []
        for slot, count in enumerate(chunk):
            if not count:
                continue
            rows = slice(row, row + count)
            batch.token_ids[rows] = torch.randint(vocab, (count,), generator=generator).int()
            batch.positions[rows] = torch.arange(lengths[slot], lengths[slot] + count).int()
            batch.slots[rows] = slot
            lengths[slot] += count
            row += count
            last.append(row - 1)
        batch.logit_rows[: len(last)] = torch.tensor(last).int()
        batch.counts[0], batch.counts[1] = row, len(last)
        program.replay()
        found.append(buffers.logits[: len(last)].clone())
    return found


def emulated(
    seed: int = 0, *, delay: int = 0, host_delay: int = 0, budget: int | None = None
) -> EmulatedDevice:
    ops = EmulatedOps(seed=seed, max_delay_us=delay, max_host_delay_us=host_delay, poison=True)
    return EmulatedDevice(ops=ops, memory=EmulatedMemory(budget))


def run(
    tiny: Tiny, near: Mapping[int, Collection[int]], device: EmulatedDevice | None = None
) -> list[Tensor]:
    device = device or emulated()
    weights = tiny.load()
    place_experts(weights, near, tiny.layers, device)
    return logits_of(tiny, weights, device)


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def everywhere(tiny: Tiny, ids: Callable[[int], Collection[int]]) -> dict[int, Collection[int]]:
    return {layer: ids(layer) for layer in tiny.layers.values()}


def random_placement(tiny: Tiny, seed: int) -> dict[int, Collection[int]]:
    generator = torch.Generator().manual_seed(seed)

    def ids(_: int) -> list[int]:
        return torch.randint(2, (tiny.num_experts,), generator=generator).nonzero()[:, 0].tolist()

    return everywhere(tiny, ids)


def test_no_expert_all_and_any_on_the_accelerator(tiny: Tiny) -> None:
    assert same(run(tiny, {}), tiny.expected)
    assert same(run(tiny, everywhere(tiny, lambda _: range(tiny.num_experts))), tiny.expected)
    first = min(tiny.layers.values())
    assert same(run(tiny, {first: range(tiny.num_experts)}), tiny.expected)
    for seed in range(3):
        assert same(run(tiny, random_placement(tiny, seed)), tiny.expected), seed


def test_whatever_the_timing(tiny: Tiny) -> None:
    for seed in range(3):
        device = emulated(seed, delay=150, host_delay=(0, 150, 1000)[seed])
        assert same(run(tiny, random_placement(tiny, seed), device), tiny.expected), seed


def test_shared_experts_of_another_format(mixed: Tiny) -> None:
    for seed in range(3):
        device = emulated(seed, delay=50)
        assert same(run(mixed, random_placement(mixed, seed), device), mixed.expected), seed


@pytest.mark.parametrize("broken", ["submit", "wait", "copy_slots"])
def test_these_tests_see_a_missing_step(
    mixed: Tiny, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.setattr(EmulatedOps, broken, lambda *_: None)
    try:
        found = run(mixed, {}, emulated(host_delay=20_000))
    except InvalidRequest:
        return  # the router met what a buffer holds at the wrong time
    assert not same(found, mixed.expected)


def test_experts_are_in_one_place_each_and_counted_there(mixed: Tiny) -> None:
    device = emulated()
    weights = mixed.load()
    key, layer = next(iter(mixed.layers.items()))
    whole = weights[key]
    blobs = [whole.blob(e).clone() for e in range(whole.num_experts)]
    nbytes, kept = whole.layout.nbytes, whole.buffer
    del whole
    place_experts(weights, {layer: [2, 0]}, mixed.layers, device)
    bank = weights[key]
    assert isinstance(bank, HybridBank)
    assert bank.ids == (0, 2) and bank.far.ids == tuple(
        e for e in range(mixed.num_experts) if e not in (0, 2)
    )
    assert bank.nbytes == 2 * nbytes and bank.far.nbytes == (mixed.num_experts - 2) * nbytes
    for expert, blob in enumerate(blobs):
        place, other = (bank, bank.far) if expert in (0, 2) else (bank.far, bank)
        assert torch.equal(place.blob(expert), blob)
        assert int(place.pointers[expert]) == place.blob(expert).data_ptr()
        assert not int(other.pointers[expert])
        with pytest.raises(InvalidRequest, match=f"expert {expert} is not in this place"):
            other.blob(expert)
    assert device.memory.held == {"experts": 2 * nbytes}
    del weights, bank, place, other
    gc.collect()
    assert device.memory.held == {}
    assert kept.numel() == mixed.num_experts * nbytes


def test_more_than_the_accelerator_holds_is_refused(mixed: Tiny) -> None:
    weights = mixed.load()
    nbytes = next(weights[key].layout.nbytes for key in mixed.layers)
    with pytest.raises(OutOfBudget, match=r"experts take .* of accelerator memory"):
        place_experts(
            weights, everywhere(mixed, lambda _: [0, 1]), mixed.layers, emulated(budget=3 * nbytes)
        )
    with pytest.raises(InvalidRequest, match=r"placed were 1\.\.99"):
        run(mixed, everywhere(mixed, lambda _: [1, 99]))

"""Logits of tiny random models against transformers, for every way a sequence can be fed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from model_cases import BANDS, LINEAR, MAIN, VARIANTS, YARN, Case
from torch import Tensor
from transformers import PreTrainedModel

from moestro import models
from moestro.checkpoints import open_checkpoint
from moestro.devices.base import Device
from moestro.memory.loader import load_weights
from moestro.memory.policy import FormatPolicy
from moestro.models import Model
from moestro.ops.contracts import Batch

PAGE = 16
LENGTH = 50  # more than three pages
SLOTS, PAGES_PER_SLOT = 3, 4


Fixture = Callable[[Case], tuple[Model, PreTrainedModel]]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], tuple[Path, Any]]:
    """Each case's model, made and written once."""
    made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def get(c: Case) -> tuple[Path, PreTrainedModel]:
        if c.name not in made:
            model = tiny_models.make(c.model_type, **dict(c.options))
            made[c.name] = c.write(model, tmp_path_factory.mktemp(c.name) / "model"), model
        return made[c.name]

    return get


@pytest.fixture(scope="session")
def built() -> dict[tuple[str, str], Model]:
    """Models by case and device: a model holds no more than its weights, so tests share it."""
    return {}


@pytest.fixture
def load(device: Device, saved: Any, built: dict[tuple[str, str], Model]) -> Fixture:
    def get(c: Case) -> tuple[Model, PreTrainedModel]:
        path, reference = saved(c)
        if (c.name, device.name) not in built:
            built[c.name, device.name] = load_model(path, device)
        return built[c.name, device.name], reference

    return get


def load_model(path: Path, device: Device) -> Model:
    checkpoint = open_checkpoint(str(path))
    try:
        description = models.describe(checkpoint)
        weights = load_weights(checkpoint, description.weights, policy=FormatPolicy.parse(""))
        return models.build(description, weights, device)
    finally:
        checkpoint.close()


class Run:
    """Feeds sequences to a model through a paged cache whose pages are scattered."""

    def __init__(self, model: Model, *, capacity: int = 64) -> None:
        self.model = model
        pages = SLOTS * PAGES_PER_SLOT
        self.cache = model.allocate_cache(pages=pages, page_size=PAGE, dtype=torch.float32)
        self.buffers = model.allocate_buffers(tokens=capacity, logits=capacity)
        self.batch = Batch.allocate(
            tokens=capacity, slots=SLOTS, pages_per_slot=PAGES_PER_SLOT, logits=capacity
        )
        scattered = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
        self.batch.page_table.copy_(scattered.view(SLOTS, PAGES_PER_SLOT))

    def describe(self, *pieces: tuple[int, Sequence[int], int]) -> int:
        """Write (slot, token ids, first position) pieces into the batch; the live token count."""
        live = 0
        for slot, ids, start in pieces:
            rows = slice(live, live + len(ids))
            self.batch.token_ids[rows] = torch.tensor(ids, dtype=torch.int32)
            self.batch.positions[rows] = torch.arange(start, start + len(ids), dtype=torch.int32)
            self.batch.slots[rows] = slot
            live += len(ids)
        self.batch.logit_rows[:live] = torch.arange(live, dtype=torch.int32)
        self.batch.counts.fill_(live)
        return live

    def step(self, *pieces: tuple[int, Sequence[int], int]) -> list[Tensor]:
        """One forward; logits [tokens, vocab] of each piece."""
        live = self.describe(*pieces)
        self.model.forward(self.batch, self.cache, self.buffers)
        return list(self.buffers.logits[:live].clone().split([len(ids) for _, ids, _ in pieces]))


@cache
def tokens(seed: int, length: int = LENGTH, vocab: int = 101) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocab, (length,), generator=generator).tolist())


@cache
def expected(reference: PreTrainedModel, ids: tuple[int, ...]) -> Tensor:
    """Logits [tokens, vocab] of transformers, computed once for all devices."""
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0]


def assert_same(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    error = (got - want).abs().max() / want.abs().max()
    assert error <= 1e-4, f"relative logit error {error:.2e}"


@pytest.mark.parametrize("c", [*MAIN, *VARIANTS], ids=str)
def test_prefill(c: Case, load: Fixture):
    model, reference = load(c)
    ids = tokens(0)
    (got,) = Run(model).step((1, ids, 0))
    assert_same(got, expected(reference, ids))


@pytest.mark.parametrize("chunk", [7, 15, 16, 17, 32, 33])
@pytest.mark.parametrize("c", MAIN, ids=str)
def test_chunked_prefill(c: Case, chunk: int, load: Fixture):
    model, reference = load(c)
    ids, run = tokens(1), Run(model, capacity=33)
    starts = range(0, LENGTH, chunk)
    got = [run.step((2, ids[at : at + chunk], at))[0] for at in starts]
    assert_same(torch.cat(got), expected(reference, ids))


@pytest.mark.parametrize("c", VARIANTS, ids=str)
def test_variants_in_chunks(c: Case, load: Fixture):
    model, reference = load(c)
    ids, run = tokens(2), Run(model, capacity=33)
    got = [run.step((0, ids[a:b], a))[0] for a, b in ((0, 17), (17, 18), (18, LENGTH))]
    assert_same(torch.cat(got), expected(reference, ids))


@pytest.mark.parametrize("c", MAIN, ids=str)
def test_decode_token_by_token(c: Case, load: Fixture):
    model, reference = load(c)
    ids, run = tokens(3), Run(model, capacity=1)
    got = [run.step((1, [token], at))[0] for at, token in enumerate(ids)]
    assert_same(torch.cat(got), expected(reference, ids))


@pytest.mark.parametrize("c", MAIN, ids=str)
def test_mixed_ragged_batches(c: Case, load: Fixture):
    """Some sequences prefill while others decode; a finished one's slot and pages are reused."""
    model, reference = load(c)
    a, b, d, e = (tokens(seed, length) for seed, length in ((4, 40), (5, 21), (6, 30), (7, 18)))
    run = Run(model)
    got: dict[str, list[Tensor]] = {"a": [], "b": [], "d": [], "e": []}

    def step(**pieces: tuple[int, Sequence[int], int]) -> None:
        for name, logits in zip(pieces, run.step(*pieces.values()), strict=True):
            got[name].append(logits)

    step(a=(0, a[:20], 0))
    step(a=(0, a[20:21], 20), b=(2, b[:16], 0))
    step(b=(2, b[16:17], 16), a=(0, a[21:22], 21), d=(1, d[:5], 0))
    step(d=(1, d[5:29], 5), b=(2, b[17:21], 17), a=(0, a[22:23], 22))
    # b is done: e takes its slot and its pages, which still hold b's keys and values.
    step(e=(2, e[:17], 0), a=(0, a[23:39], 23), d=(1, d[29:30], 29))
    step(a=(0, a[39:40], 39), e=(2, e[17:18], 17))
    for name, ids in (("a", a), ("b", b), ("d", d), ("e", e)):
        assert_same(torch.cat(got[name]), expected(reference, ids))


@pytest.mark.parametrize("c", MAIN, ids=str)
def test_recorded_steps_replay_for_other_batches(c: Case, load: Fixture, device: Device):
    model, reference = load(c)
    run = Run(model)
    run.describe((0, tokens(8)[:3], 0))
    with device.ops.record() as program:
        model.forward(run.batch, run.cache, run.buffers)
    assert not run.buffers.logits.any(), "recording ran the step"
    ids = tokens(9)
    got = []
    for a, b in ((0, 33), (33, 34), (34, LENGTH)):
        live = run.describe((1, ids[a:b], a))
        program.replay()
        got.append(run.buffers.logits[:live].clone())
    assert_same(torch.cat(got), expected(reference, ids))


@pytest.mark.parametrize("c", MAIN, ids=str)
def test_only_asked_rows_get_logits(c: Case, load: Fixture):
    model, reference = load(c)
    a, b, run = tokens(10, 20), tokens(11, 9), Run(model)
    run.describe((0, a, 0), (1, b, 0))
    run.batch.logit_rows[:2] = torch.tensor([28, 19], dtype=torch.int32)
    run.batch.counts[1] = 2
    run.model.forward(run.batch, run.cache, run.buffers)
    want = torch.stack([expected(reference, b)[-1], expected(reference, a)[-1]])
    assert_same(run.buffers.logits[:2], want)
    assert not run.buffers.logits[2:].any()


@pytest.mark.parametrize("scaling", [LINEAR, BANDS, YARN], ids=lambda s: s["rope_type"])
def test_old_spelling_of_rope_scaling(scaling: dict[str, Any], load: Fixture, tmp_path: Path,
                                      device: Device):  # fmt: skip
    reference = tiny_models.make("llama", rope_parameters={"rope_theta": 5000.0, **scaling})
    path = tiny_models.write_safetensors(reference, tmp_path / "model")
    old = {"type" if k == "rope_type" else k: v for k, v in scaling.items()}
    tiny_models.change_config(path, ("rope_parameters",), rope_theta=5000.0, rope_scaling=old)
    (got,) = Run(load_model(path, device)).step((0, tokens(0), 0))
    assert_same(got, expected(reference, tokens(0)))

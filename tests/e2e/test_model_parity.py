"""Logits of tiny random models against transformers, for every way a sequence can be fed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor
from transformers import PreTrainedModel

from moestro import models
from moestro.checkpoints import open_checkpoint
from moestro.devices.base import Device
from moestro.memory.convert import convert
from moestro.memory.loader import load_weights
from moestro.memory.policy import FormatPolicy
from moestro.models import Model
from moestro.ops.contracts import Batch

PAGE = 16
LENGTH = 50  # more than three pages
SLOTS, PAGES_PER_SLOT = 3, 4


@dataclass(frozen=True)
class Case:
    """A family with changed options. ``write`` puts the model on disk below a folder."""

    name: str
    model_type: str
    options: tuple[tuple[str, Any], ...] = ()
    write: Callable[[PreTrainedModel, Path], Path] = tiny_models.write_safetensors

    def __str__(self) -> str:
        return self.name


def case(name: str, model_type: str, write: Any = tiny_models.write_safetensors, **options: Any):
    return Case(name, model_type, tuple(options.items()), write)


def gguf_file(model: PreTrainedModel, folder: Path) -> Path:
    folder.mkdir()
    return tiny_models.write_gguf(model, folder / "model.gguf")


def old_gguf_file(model: PreTrainedModel, folder: Path) -> Path:
    folder.mkdir()
    return tiny_models.write_gguf(model, folder / "model.gguf", one_tensor_per_expert=True)


def unsplit_gguf_file(model: PreTrainedModel, folder: Path) -> Path:
    folder.mkdir()
    return tiny_models.write_gguf(model, folder / "model.gguf", split_latent=False)


def renamed(model_type: str):
    """The same checkpoint under the name of a family that shares the architecture."""

    def write(model: PreTrainedModel, folder: Path) -> Path:
        path = tiny_models.write_safetensors(model, folder)
        tiny_models.change_config(path, model_type=model_type)
        return path

    return write


def packed(source: Callable[[PreTrainedModel, Path], Path]):
    """The written checkpoint converted to a packed directory, values kept."""

    def write(model: PreTrainedModel, folder: Path) -> Path:
        checkpoint = open_checkpoint(str(source(model, folder)))
        try:
            specs = models.describe(checkpoint).weights
            convert(checkpoint, specs, folder.with_name("packed"), policy=FormatPolicy.parse(""))
        finally:
            checkpoint.close()
        return folder.with_name("packed")

    return write


def changed(change: Callable[[str, Tensor], Tensor], source: Any = tiny_models.write_safetensors):
    """The model with ``change(name, weight)`` for each of its weights."""

    def write(model: PreTrainedModel, folder: Path) -> Path:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(change(name, weight))
        return source(model, folder)

    return write


def moved_sinks(by: float):
    return changed(lambda name, weight: weight + by if name.endswith("sinks") else weight)


def wide_experts(name: str, weight: Tensor) -> Tensor:
    """So wide that gate and up meet their limits."""
    return 6 * weight if ".experts.gate_up" in name else weight


LINEAR = {"rope_type": "linear", "factor": 4.0}
BANDS = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN_MSCALE = {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 16, "truncate": False}
YARN_SAME = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}

#: fed in every way
MAIN = [
    case("llama", "llama"),
    case("mixtral", "mixtral"),
    case("qwen2_moe", "qwen2_moe"),
    case("qwen3_moe", "qwen3_moe"),
    case("mixtral-window", "mixtral", sliding_window=20),
    case("gpt_oss", "gpt_oss"),
    case("deepseek_v2", "deepseek_v2"),
    case("deepseek_v3", "deepseek_v3"),
]
#: fed one-shot and in chunks
VARIANTS = [
    case("llama-tied", "llama", tie_word_embeddings=True),
    case("llama-heads-not-shared", "llama", num_key_value_heads=3),
    case("llama-wide-heads", "llama", head_dim=32, num_attention_heads=4, num_key_value_heads=2),
    case("llama-bias", "llama", attention_bias=True),
    case("llama-linear", "llama", rope_parameters=LINEAR),
    case("llama-llama3", "llama", rope_parameters=BANDS),
    case("llama-yarn", "llama", rope_parameters=YARN),
    case("llama-yarn-mscale", "llama", rope_parameters=YARN_MSCALE),
    case("llama-yarn-factor", "llama", rope_parameters={**YARN, "attention_factor": 1.3}),
    case("llama-dynamic", "llama", rope_parameters=DYNAMIC),
    case("mixtral-top-1", "mixtral", num_experts_per_tok=1),
    case("mixtral-all", "mixtral", num_experts_per_tok=4),
    case("mixtral-one-expert", "mixtral", num_local_experts=1, num_experts_per_tok=1),
    case("mixtral-tied", "mixtral", tie_word_embeddings=True),
    case("mixtral-fused", "mixtral", tiny_models.write_fused),
    case("qwen2-moe-normalized", "qwen2_moe", norm_topk_prob=True),
    case("qwen2-moe-every-second", "qwen2_moe", decoder_sparse_step=2),
    case("qwen2-moe-first-dense", "qwen2_moe", mlp_only_layers=[0]),
    case("qwen2-moe-no-bias", "qwen2_moe", qkv_bias=False),
    case("qwen2-moe-all", "qwen2_moe", num_experts_per_tok=5),
    case("qwen2-moe-top-1", "qwen2_moe", num_experts_per_tok=1),
    case("qwen2-moe-fused", "qwen2_moe", tiny_models.write_fused),
    case(
        "qwen2-moe-window", "qwen2_moe", use_sliding_window=True, sliding_window=9,
        max_window_layers=2,
    ),
    case("qwen3-moe-not-normalized", "qwen3_moe", norm_topk_prob=False),
    case("qwen3-moe-last-dense", "qwen3_moe", mlp_only_layers=[1]),
    case("qwen3-moe-bias", "qwen3_moe", attention_bias=True),
    case("qwen3-moe-window", "qwen3_moe", use_sliding_window=True, sliding_window=17),
    case("qwen3-moe-tied", "qwen3_moe", tie_word_embeddings=True),
    case("qwen3-moe-fused", "qwen3_moe", tiny_models.write_fused),
    case("qwen3-moe-yarn", "qwen3_moe", rope_parameters=YARN),
    case("gpt-oss-clamped", "gpt_oss", changed(wide_experts)),
    case("gpt-oss-sinks-rule", "gpt_oss", moved_sinks(30.0)),
    case("gpt-oss-sinks-vanish", "gpt_oss", moved_sinks(-200.0)),
    case("gpt-oss-window-1", "gpt_oss", sliding_window=1),
    case("gpt-oss-window-16", "gpt_oss", sliding_window=16),
    case("gpt-oss-all-full", "gpt_oss", layer_types=["full_attention"] * 2),
    case("gpt-oss-full-first", "gpt_oss", layer_types=["full_attention", "sliding_attention"]),
    case("gpt-oss-three-layers", "gpt_oss", num_hidden_layers=3),
    case("gpt-oss-no-attention-bias", "gpt_oss", attention_bias=False),
    case("gpt-oss-top-1", "gpt_oss", num_experts_per_tok=1),
    case("gpt-oss-all", "gpt_oss", num_experts_per_tok=5),
    case("gpt-oss-one-expert", "gpt_oss", num_local_experts=1, num_experts_per_tok=1),
    case("gpt-oss-heads-not-shared", "gpt_oss", num_key_value_heads=4),
    case("gpt-oss-tied", "gpt_oss", tie_word_embeddings=True),
    case("gpt-oss-plain-rope", "gpt_oss", rope_parameters={"rope_type": "default",
                                                           "rope_theta": 1e4}),
    case("gpt-oss-yarn-truncated", "gpt_oss", rope_parameters={**YARN, "rope_theta": 150000.0}),
    case("gpt-oss-default-rope", "gpt_oss", rope_parameters=None, max_position_embeddings=4096),
    case("gpt-oss-packed", "gpt_oss", packed(tiny_models.write_safetensors)),
    case("gpt-oss-gguf", "gpt_oss", gguf_file),
    case("gpt-oss-gguf-packed", "gpt_oss", packed(gguf_file)),
    case("deepseek-v2-greedy", "deepseek_v2", topk_method="greedy"),
    case("deepseek-v2-no-query-lora", "deepseek_v2", q_lora_rank=None),
    case("deepseek-v2-yarn", "deepseek_v2", rope_parameters=YARN_SAME),
    case("deepseek-v2-yarn-mscale", "deepseek_v2", rope_parameters=YARN_MSCALE),
    case("deepseek-v2-one-shared", "deepseek_v2", n_shared_experts=1),
    case("deepseek-v2-all-dense", "deepseek_v2", first_k_dense_replace=3),
    case("deepseek-v2-none-dense", "deepseek_v2", first_k_dense_replace=0),
    case("deepseek-v2-bias", "deepseek_v2", attention_bias=True),
    case("deepseek-v2-tied", "deepseek_v2", tie_word_embeddings=True),
    case("deepseek-v2-fused", "deepseek_v2", tiny_models.write_fused),
    case("deepseek-v2-packed", "deepseek_v2", packed(tiny_models.write_safetensors)),
    case("deepseek-v3-one-group", "deepseek_v3", n_group=1, topk_group=1),
    case("deepseek-v3-not-normalized", "deepseek_v3", norm_topk_prob=False),
    case("deepseek-v3-no-query-lora", "deepseek_v3", q_lora_rank=None),
    case("deepseek-v3-plain-rope", "deepseek_v3", rope_parameters={"rope_type": "default",
                                                                   "rope_theta": 1e4}),
    case("deepseek-v3-yarn-mscale", "deepseek_v3", rope_parameters=YARN_MSCALE),
    case("deepseek-v3-yarn-unscaled", "deepseek_v3", rope_parameters=YARN),
    case("deepseek-v3-halves", "deepseek_v3", rope_interleave=False),
    case("deepseek-v3-two-shared", "deepseek_v3", n_shared_experts=2),
    case("deepseek-v3-two-dense", "deepseek_v3", first_k_dense_replace=2),
    case("deepseek-v3-bias", "deepseek_v3", attention_bias=True),
    case("deepseek-v3-many-heads", "deepseek_v3", num_attention_heads=18, num_key_value_heads=18),
    case("deepseek-v3-packed", "deepseek_v3", packed(tiny_models.write_fused)),
    case("kimi-k2", "deepseek_v3", renamed("kimi_k2"), n_group=1, topk_group=1),
    case("deepseek-v2-gguf", "deepseek_v2", gguf_file),
    case("deepseek-v2-gguf-lite", "deepseek_v2", gguf_file, q_lora_rank=None, topk_method="greedy",
         rope_parameters=YARN_SAME),
    case("deepseek-v2-gguf-unsplit", "deepseek_v2", unsplit_gguf_file),
    case("deepseek-v3-gguf", "deepseek_v3", gguf_file),
    case("deepseek-v3-gguf-unscaled", "deepseek_v3", gguf_file, rope_parameters=YARN),
    case("deepseek-v3-gguf-unsplit", "deepseek_v3", unsplit_gguf_file, n_shared_experts=2),
    case("deepseek-v3-gguf-packed", "deepseek_v3", packed(gguf_file)),
    case("llama-gguf", "llama", gguf_file),
    case("llama-gguf-tied", "llama", gguf_file, tie_word_embeddings=True),
    case("llama-gguf-bias", "llama", gguf_file, attention_bias=True),
    case("llama-gguf-llama3", "llama", gguf_file, rope_parameters=BANDS),
    case("llama-gguf-linear", "llama", gguf_file, rope_parameters=LINEAR),
    case("llama-gguf-yarn", "llama", gguf_file, rope_parameters=YARN),
    case("mixtral-gguf", "mixtral", gguf_file),
    case("mixtral-gguf-old", "mixtral", old_gguf_file),
    case("qwen2-moe-gguf", "qwen2_moe", gguf_file),
    case("qwen3-moe-gguf", "qwen3_moe", gguf_file),
    case("llama-gguf-packed", "llama", packed(gguf_file), rope_parameters=BANDS),
    case("mixtral-packed", "mixtral", packed(tiny_models.write_safetensors)),
    case("qwen2-moe-packed", "qwen2_moe", packed(tiny_models.write_safetensors)),
    case("qwen2-moe-gguf-packed", "qwen2_moe", packed(gguf_file)),
    case("qwen3-moe-packed", "qwen3_moe", packed(tiny_models.write_fused), mlp_only_layers=[0]),
]  # fmt: skip

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


@pytest.fixture
def load(device: Device, saved: Any) -> Fixture:
    def get(c: Case) -> tuple[Model, PreTrainedModel]:
        path, reference = saved(c)
        return load_model(path, device), reference

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


def expected(reference: PreTrainedModel, ids: Sequence[int]) -> Tensor:
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

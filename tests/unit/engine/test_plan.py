"""The memory plan: what is chosen without being asked, and refusals with their numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from moestro.core.errors import InvalidRequest, OutOfBudget
from moestro.engine.config import DEFAULT_CONTEXT, EngineConfig
from moestro.engine.plan import plan_memory
from moestro.engine.shape import _caches
from moestro.memory.model_shape import Group, ModelShape
from moestro.memory.plan import SMALLEST_CONTEXT, Plan
from moestro.models.spec import ModelDescription, ModelSpec
from moestro.nn.kv_cache import KvShape, LatentShape, allocate_kv

MIB = 2**20
WEIGHTS = 100 * MIB


@dataclass(frozen=True)
class Config:
    num_heads: int = 4


def spec(context: int = 32768) -> ModelSpec:
    return ModelSpec(
        model_type="test",
        hidden_size=64,
        num_layers=4,
        vocab_size=1000,
        caches=(KvShape(kv_heads=2, head_dim=64),) * 4,
        context_length=context,
    )


def plan(
    budget: int, model_context: int = 32768, *, model: ModelSpec | None = None, **options: object
) -> Plan:
    config = EngineConfig.from_options(options)
    known = model or spec(model_context)
    described = ModelDescription(config=Config(), spec=known, weights=[])
    shape = ModelShape(
        name="test",
        hidden_size=known.hidden_size,
        vocab_size=known.vocab_size,
        context_length=known.context_length,
        groups=(Group(key="lm_head", layer=-1, nbytes=WEIGHTS, products=()),),
        experts=(),
        caches=_caches(described, getattr(torch, config.kv_dtype)),
        scratch_per_token=1024,
    )
    return plan_memory(shape, config, budget=budget)


def test_with_plenty_every_sequence_gets_the_whole_context() -> None:
    chosen = plan(10_000 * MIB)
    assert chosen.context == DEFAULT_CONTEXT
    assert chosen.pages == 8 * DEFAULT_CONTEXT // 32
    # 2 (k, v) x 4 layers x 2 heads x 64 x 32 positions x 2 bytes
    assert chosen.page_nbytes == 2 * 4 * 2 * 64 * 32 * 2
    ram = chosen.ram
    assert ram.weights == WEIGHTS and ram.kv == chosen.pages * chosen.page_nbytes
    assert ram.total == ram.weights + ram.buffers + ram.kv <= ram.budget


def test_a_short_model_bounds_the_default_context() -> None:
    assert plan(10_000 * MIB, model_context=2048).context == 2048


def test_sequences_share_pages_where_memory_is_short() -> None:
    chosen = plan(WEIGHTS + 25 * MIB)
    assert chosen.context == DEFAULT_CONTEXT
    assert DEFAULT_CONTEXT // 32 <= chosen.pages < 8 * DEFAULT_CONTEXT // 32
    assert chosen.ram.total <= chosen.ram.budget


def test_the_default_context_shrinks_before_anything_is_refused() -> None:
    chosen = plan(WEIGHTS + 4 * MIB)
    assert SMALLEST_CONTEXT <= chosen.context < DEFAULT_CONTEXT
    assert chosen.pages * 32 >= chosen.context
    assert chosen.ram.total <= chosen.ram.budget


@pytest.mark.parametrize("budget", [0, WEIGHTS, WEIGHTS + MIB])
def test_what_does_not_fit_is_refused_with_every_number(budget: int) -> None:
    with pytest.raises(OutOfBudget) as error:
        plan(budget, memory="1GiB")
    text = str(error.value)
    for word in ("weights", "100 MiB", "KV cache", "buffers", "budget", "missing", "Ways out"):
        assert word in text


def test_a_context_that_was_asked_for_is_never_made_smaller() -> None:
    with pytest.raises(OutOfBudget, match="16384 tokens"):
        plan(WEIGHTS + 20 * MIB, context=16384)


def test_a_context_beyond_the_models_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidRequest, match=r"4096.*2048"):
        plan(10_000 * MIB, model_context=2048, context=4096)


@pytest.mark.parametrize(("dtype", "nbytes"), [("float16", 2), ("bfloat16", 2), ("float32", 4)])
def test_kv_dtype_decides_page_bytes(dtype: str, nbytes: int) -> None:
    assert plan(10_000 * MIB, kv_dtype=dtype).page_nbytes == 2 * 4 * 2 * 64 * 32 * nbytes


def test_an_int8_cache_counts_its_scales_and_what_is_allocated() -> None:
    cache = allocate_kv(pages=3, page_size=32, kv_heads=2, head_dim=64, dtype=torch.int8)
    tensors = (cache.k, cache.v, cache.k_scale, cache.v_scale)
    nbytes = sum(x.numel() * x.itemsize for x in tensors if x is not None)
    page = plan(10_000 * MIB, kv_dtype="int8").page_nbytes
    assert page * 3 == 4 * nbytes  # four layers
    assert page == 4 * 2 * 32 * (2 * 64 + 2 * 3)


def test_layers_may_cache_different_things() -> None:
    latent = LatentShape(rank=512, rope_dim=64)
    mixed = replace(spec(), caches=(latent, KvShape(kv_heads=2, head_dim=64), latent))
    assert plan(10_000 * MIB, model=mixed).page_nbytes == 32 * 2 * (576 + 2 * 2 * 64 + 576)
    with pytest.raises(InvalidRequest, match="int8 KV cache is not implemented for latent"):
        plan(10_000 * MIB, model=mixed, kv_dtype="int8")

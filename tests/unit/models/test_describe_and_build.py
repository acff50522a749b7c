"""From a checkpoint's configuration to the list of weights, and from weights to a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from moestro import devices, formats, models
from moestro.core.errors import CheckpointError, InvalidRequest, UnsupportedArchitecture
from moestro.formats.base import PackedWeight
from moestro.memory.expert_bank import BlobLayout, ExpertBank
from moestro.memory.weights import ExpertSources, HeadRows, WeightSpec

FAMILIES = ["deepseek_v2", "deepseek_v3", "gpt_oss", "kimi_k2", "llama", "mixtral", "qwen2_moe",
            "qwen3_moe"]  # fmt: skip
F32 = formats.get("f32")


@dataclass
class Opened:
    """What ``describe`` reads of a checkpoint."""

    config: dict[str, Any]
    container: str = "safetensors"
    path: Path = field(default=Path("somewhere"))

    @property
    def architecture(self) -> str:
        return self.config.get("model_type") or self.config["general.architecture"]


@dataclass
class OpenedPacked(Opened):
    container: str = "packed"
    config_container: str = "safetensors"


GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 48,
    "llama.feed_forward_length": 40,
    "llama.attention.head_count": 3,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 101,
}


def tiny(name: str, **changes: Any) -> models.ModelDescription:
    return models.describe(Opened({**models.family(name).tiny(), **changes}))


def random_weight(spec: WeightSpec) -> Any:
    if spec.kind == "vector":
        return torch.randn(spec.shape)
    if spec.kind == "matrix":
        data = F32.pack(torch.randn(spec.shape))
        return PackedWeight(format=F32, rows=spec.shape[0], cols=spec.shape[1], data=data)
    experts, inter, hidden = spec.shape
    layout = BlobLayout.plan(
        [("f32", inter, hidden), ("f32", inter, hidden), ("f32", hidden, inter)]
    )
    return ExpertBank(layout, experts, buffer=torch.zeros(experts * layout.nbytes).byte())


def random_weights(description: models.ModelDescription) -> dict[str, Any]:
    return {spec.key: random_weight(spec) for spec in description.weights}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_weight_has_one_key_and_names_in_both_containers(name: str):
    description = tiny(name)
    keys = [spec.key for spec in description.weights]
    assert len(set(keys)) == len(keys)
    assert keys[0] == "embed_tokens" and keys[-2:] == ["norm", "lm_head"]
    for spec in description.weights:
        if spec.role == "experts" and name == "gpt_oss":
            continue  # stored differently in each container, see below
        if spec.kind == "experts":
            sources = spec.expert_sources
            named = [sources.gate, sources.up, sources.down]
        else:
            named = [spec.sources + (spec.head_rows.sources if spec.head_rows else ())]
        for candidates in named:
            assert any(c.startswith(("model.", "lm_head")) for c in candidates), spec.key
            assert any(c.startswith(("blk.", "token_embd", "output")) for c in candidates), spec.key
        in_layer = spec.key.startswith("layers.")
        assert spec.layer == (int(spec.key.split(".")[1]) if in_layer else -1)


def test_experts_with_biases_in_both_containers():
    in_safetensors = {s.key: s for s in tiny("gpt_oss").weights if s.role == "experts"}
    at, key = "model.layers.1.mlp.experts", "layers.1.experts"
    assert in_safetensors[key].expert_sources == ExpertSources(
        gate_up=(f"{at}.gate_up_proj",), down=(f"{at}.down_proj",), layout="interleaved_transposed"
    )
    assert in_safetensors[f"{key}.gate_up_bias"].sources == (f"{at}.gate_up_proj_bias",)
    assert in_safetensors[f"{key}.gate_up_bias"].shape == (5, 80)
    assert in_safetensors[f"{key}.down_bias"].shape == (5, 48)
    metadata = {k.replace("llama.", "gpt-oss."): v for k, v in GGUF.items()} | {
        "general.architecture": "gpt-oss", "gpt-oss.expert_count": 4,
        "gpt-oss.expert_used_count": 2, "gpt-oss.attention.sliding_window": 8,
    }  # fmt: skip
    specs = models.describe(Opened(metadata, "gguf")).weights
    in_gguf = {s.key: s for s in specs if s.role == "experts"}
    assert in_gguf[key].expert_sources == ExpertSources(
        **{part: (f"blk.1.ffn_{part}_exps.weight",) for part in ("gate", "up", "down")}
    )
    for part in ("gate", "up", "down"):
        assert in_gguf[f"{key}.{part}_bias"].sources == (f"blk.1.ffn_{part}_exps.bias",)
    for found in (in_safetensors, in_gguf):
        assert found[key].activation == "swiglu_oai"


def test_biases_come_to_the_experts_they_belong_to():
    description = tiny("gpt_oss")
    weights = random_weights(description)
    both = weights["layers.1.experts.gate_up_bias"]
    models.build(description, weights, devices.get("reference"))
    biases = weights["layers.1.experts"].biases
    assert torch.equal(biases.gate, both[:, ::2]) and torch.equal(biases.up, both[:, 1::2])
    assert torch.equal(biases.down, weights["layers.1.experts.down_bias"])


def test_tied_models_have_no_head():
    keys = [s.key for s in tiny("llama", tie_word_embeddings=True).weights]
    assert "lm_head" not in keys


def test_what_a_gguf_file_may_leave_out_is_optional():
    description = models.describe(Opened(GGUF, "gguf"))
    optional = {s.key for s in description.weights if s.optional}
    biases = {f"layers.{n}.attention.{p}_proj.bias" for n in range(2) for p in ("q", "k", "v", "o")}
    assert optional == {"rope_divisors", "lm_head", *biases}
    assert not any(s.optional for s in tiny("llama").weights)


def test_only_gguf_llama_files_have_permuted_rows():
    by_key = {s.key: s for s in models.describe(Opened(GGUF, "gguf")).weights}
    assert by_key["layers.1.attention.q_proj"].unpermute_heads == 3
    assert by_key["layers.1.attention.q_proj.bias"].unpermute_heads == 3
    assert by_key["layers.1.attention.k_proj"].unpermute_heads == 1
    assert by_key["layers.1.attention.v_proj"].unpermute_heads == 0
    assert by_key["layers.1.attention.o_proj"].unpermute_heads == 0
    qwen = {k.replace("llama.", "qwen3moe."): v for k, v in GGUF.items()}
    qwen |= {"general.architecture": "qwen3moe", "qwen3moe.expert_count": 4,
             "qwen3moe.expert_used_count": 2}  # fmt: skip
    for description in (tiny("llama"), tiny("mixtral"), models.describe(Opened(qwen, "gguf"))):
        assert not any(s.unpermute_heads for s in description.weights)


def test_packed_models_are_described_by_what_they_were_made_from():
    raw = models.family("mixtral").tiny()
    assert models.describe(OpenedPacked(raw)) == models.describe(Opened(raw))
    packed = models.describe(OpenedPacked(GGUF, config_container="gguf"))
    assert packed == models.describe(Opened(GGUF, "gguf"))
    assert packed.spec.model_type == "llama"
    with pytest.raises(CheckpointError, match="does not say"):
        models.describe(Opened(raw, "packed"))


def test_projections_of_latent_attention_are_found_alone_or_together():
    by_key = {s.key: s for s in tiny("deepseek_v3").weights}
    key, value = (by_key[f"layers.1.attention.{part}_proj"] for part in ("key", "value"))
    assert (key.shape, value.shape) == ((3 * 32, 12), (3 * 16, 32))
    assert (key.sources, value.sources) == (("blk.1.attn_k_b.weight",), ("blk.1.attn_v_b.weight",))
    together = ("model.layers.1.self_attn.kv_b_proj.weight", "blk.1.attn_kv_b.weight")
    assert key.head_rows == HeadRows(
        sources=together, heads=3, rows=28, first=0, count=12, transposed=True
    )
    assert value.head_rows == HeadRows(sources=together, heads=3, rows=28, first=12, count=16)
    assert all(spec.head_rows.stored_shape(spec.shape) == (3 * 28, 32) for spec in (key, value))


def test_the_bias_on_the_choice_of_experts_is_of_sigmoid_routers():
    for name, there in (("deepseek_v2", False), ("deepseek_v3", True), ("kimi_k2", True)):
        keys = {spec.key for spec in tiny(name).weights}
        assert ("layers.1.router.choice_bias" in keys) == there
        assert "layers.0.router.choice_bias" not in keys


def test_unknown_families_are_named():
    with pytest.raises(UnsupportedArchitecture, match="'bert' is not implemented; these are"):
        models.describe(Opened({"model_type": "bert"}))
    with pytest.raises(UnsupportedArchitecture, match="GGUF architecture 'gemma' is not impl"):
        models.describe(Opened({"general.architecture": "gemma"}, "gguf"))


@pytest.mark.parametrize("name", FAMILIES)
def test_build_refuses_missing_weights(name: str):
    description = tiny(name)
    weights = random_weights(description)
    gone = [description.weights[i].key for i in (2, 5)]
    for key in gone:
        del weights[key]
    with pytest.raises(CheckpointError, match=rf"2 weights .* first: {gone[0]}, {gone[1]}"):
        models.build(description, weights, devices.get("reference"))


@pytest.mark.parametrize("kind", ["vector", "matrix", "experts"])
def test_build_refuses_wrong_shapes(kind: str):
    description = tiny("mixtral")
    weights = random_weights(description)
    spec = next(s for s in description.weights if s.kind == kind)
    wrong = WeightSpec(key=spec.key, kind=kind, role=spec.role, shape=(spec.shape[0] + 1,
                       *spec.shape[1:]))  # fmt: skip
    weights[spec.key] = random_weight(wrong)
    with pytest.raises(CheckpointError, match=rf"weight {spec.key} was loaded as"):
        models.build(description, weights, devices.get("reference"))


def test_build_caps_the_context():
    description = tiny("llama")
    weights, device = random_weights(description), devices.get("reference")
    assert models.build(description, weights, device).spec.context_length == 256
    model = models.build(description, weights, device, max_positions=100)
    assert model.spec.context_length == 100
    assert description.spec.context_length == 256
    for wrong in (0, 257):
        with pytest.raises(InvalidRequest, match=f"{wrong} tokens .* takes 1 to 256"):
            models.build(description, weights, device, max_positions=wrong)


def test_model_allocates_by_its_spec():
    description = tiny("qwen3_moe")
    model = models.build(description, random_weights(description), devices.get("reference"))
    cache = model.allocate_cache(pages=3, page_size=32, dtype=torch.bfloat16)
    assert len(cache) == 2
    assert cache[0].v.shape == (3, 2, 32, 16) and cache[0].v.dtype == torch.bfloat16
    assert cache[0].v.data_ptr() != cache[1].v.data_ptr()
    buffers = model.allocate_buffers(tokens=9, logits=2)
    assert buffers.logits.shape == (2, 101) and buffers.tokens == 9


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_caches_one_row_per_position(name: str):
    description = tiny(name)
    model = models.build(description, random_weights(description), devices.get("reference"))
    cache = model.allocate_cache(pages=3, page_size=32, dtype=torch.float16)
    assert [c.rows.shape for c in cache] == [(3, 32, 32 + 8)] * 3
    assert {(c.rows.dtype, c.rank, c.pages, c.page_size) for c in cache} == {
        (torch.float16, 32, 3, 32)
    }
    with pytest.raises(InvalidRequest, match="page size 24"):
        model.allocate_cache(pages=3, page_size=24, dtype=torch.float16)
    with pytest.raises(InvalidRequest, match="int8 KV cache is not implemented for latent"):
        model.allocate_cache(pages=3, page_size=32, dtype=torch.int8)

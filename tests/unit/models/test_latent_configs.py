"""Configurations of families with latent attention: what is taken, assumed and refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moestro import models
from moestro.core import log
from moestro.core.errors import CheckpointError, UnsupportedArchitecture
from moestro.nn.kv_cache import LatentShape
from moestro.nn.rope import YarnScaling

FAMILIES = ["deepseek_v2", "deepseek_v3", "kimi_k2"]
#: of config.json of DeepSeek-V3 as published
PUBLISHED = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "ep_size": 1,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
GGUF = {
    "block_count": 3,
    "context_length": 256,
    "embedding_length": 48,
    "feed_forward_length": 40,
    "attention.head_count": 3,
    "attention.head_count_kv": 1,
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 20,
    "attention.value_length_mla": 16,
    "attention.q_lora_rank": 28,
    "attention.kv_lora_rank": 32,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": 8,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_log_multiplier": 0.1,
    "leading_dense_block_count": 1,
    "expert_count": 12,
    "expert_used_count": 3,
    "expert_shared_count": 2,
    "expert_feed_forward_length": 24,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "vocab_size": 101,
}


def from_hf(model_type: str, *remove: str, **changes: Any):
    family = models.family(model_type)
    raw = {k: v for k, v in {**family.tiny(), **changes}.items() if k not in remove}
    return family.Config.from_hf(raw)


def metadata(*remove: str, **changes: Any) -> dict[str, Any]:
    """GGUF key/values; in ``changes`` two underscores stand for a dot."""
    keys = {**GGUF, **{name.replace("__", "."): value for name, value in changes.items()}}
    own = {f"deepseek2.{k}": v for k, v in keys.items() if k not in remove}
    return {"general.architecture": "deepseek2", **own}


def from_gguf(*remove: str, model_type: str = "deepseek_v3", **changes: Any):
    return models.family(model_type).Config.from_gguf(metadata(*remove, **changes))


def test_the_published_configuration():
    config = models.family("deepseek_v3").Config.from_hf(PUBLISHED)
    temperature = 0.1 * math.log(40) + 1
    assert config.softmax_scale == pytest.approx(192**-0.5 * temperature**2)
    assert config.rope.scaling == YarnScaling(
        factor=40.0, original_context=4096, attention_factor=1.0
    )
    assert (config.rope.rotary_dim, config.rope.interleaved) == (64, True)
    assert (config.nope_head_dim, config.head_dim, config.v_head_dim) == (128, 64, 128)
    assert (config.groups, config.top_groups, config.top_k) == (8, 4, 8)
    assert config.dense_layers == {0, 1, 2}
    assert config.shared_intermediate_size == 2048
    spec = config.spec()
    assert spec.caches == (LatentShape(rank=512, rope_dim=64),) * 61
    assert spec.caches[0].position_nbytes(torch.float16) == 2 * 576
    assert spec.context_length == 163840


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_is_a_configuration(name: str):
    spec = from_hf(name).spec()
    assert (spec.model_type, spec.hidden_size, spec.num_layers) == (name, 48, 3)
    assert spec.caches == (LatentShape(rank=32, rope_dim=8),) * 3
    assert spec.context_length == 256


def test_absent_keys_are_what_transformers_assumes():
    silent = (
        "q_lora_rank", "n_group", "topk_group", "n_shared_experts", "norm_topk_prob",
        "routed_scaling_factor", "first_k_dense_replace", "moe_intermediate_size",
    )  # fmt: skip
    third = from_hf("deepseek_v3", *silent, n_routed_experts=64)
    assert (third.q_lora_rank, third.groups, third.top_groups) == (1536, 8, 4)
    assert (third.shared_intermediate_size, third.moe_intermediate_size) == (2048, 2048)
    assert (third.norm_topk_prob, third.routed_scaling_factor) == (True, 2.5)
    assert third.dense_layers == {0, 1, 2}
    second = from_hf("deepseek_v2", *silent, "topk_method")
    assert (second.q_lora_rank, second.groups, second.routed_scaling_factor) == (1536, 1, 1.0)
    assert (second.shared_intermediate_size, second.dense_layers) == (2 * 1407, frozenset())


def test_null_means_without():
    config = from_hf("deepseek_v3", q_lora_rank=None, n_shared_experts=None)
    assert (config.q_lora_rank, config.shared_intermediate_size) == (0, 0)
    keys = {spec.key for spec in models.family("deepseek_v3").weights(config, "safetensors")}
    assert "layers.1.attention.q_proj" in keys
    assert not {"layers.1.attention.q_down", "layers.1.shared_expert"} & keys


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"moe_layer_freq": 2}, UnsupportedArchitecture, "moe_layer_freq = 2"),
        ({"scoring_func": "tanh"}, UnsupportedArchitecture, "scoring_func = 'tanh'"),
        ({"topk_method": "random"}, UnsupportedArchitecture, "topk_method = 'random'"),
        ({"kv_lora_rank": 40}, UnsupportedArchitecture, "kv_lora_rank = 40 .* multiples of 16"),
        ({"v_head_dim": 24}, UnsupportedArchitecture, "v_head_dim = 24 .* multiples of 16"),
        ({"num_key_value_heads": 1}, UnsupportedArchitecture, "num_key_value_heads = 1"),
        ({"hidden_act": "gelu"}, UnsupportedArchitecture, "hidden_act = 'gelu'"),
        ({"num_experts_per_tok": 13}, CheckpointError, "experts per token is 13"),
        ({"rope_scaling": {"type": "longrope"}}, UnsupportedArchitecture, "rope_type = 'longrope'"),
    ],
)
def test_options_that_change_the_result_are_refused(
    name: str, changes: dict[str, Any], error: type[Exception], named: str
):
    with pytest.raises(error, match=named):
        from_hf(name, **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_group": 5}, "expert groups is 5, it should be a divisor of the 12 experts"),
        ({"topk_group": 5}, "expert groups per token is 5, it should be 1 to 4"),
        ({"topk_group": 1, "num_experts_per_tok": 4}, "at most the 3 experts of 1 groups"),
    ],
)
def test_groups_must_hold_the_experts(changes: dict[str, Any], named: str):
    for name in ("deepseek_v2", "deepseek_v3"):
        with pytest.raises(CheckpointError, match=named):
            from_hf(name, **changes)


def test_weights_that_are_computed_differently_everywhere_are_refused():
    with pytest.raises(UnsupportedArchitecture, match="norm_topk_prob = True"):
        from_hf("deepseek_v2", norm_topk_prob=True)
    with pytest.raises(UnsupportedArchitecture, match="mlp_bias = True"):
        from_hf("deepseek_v2", mlp_bias=True)


def test_predicting_layers_are_left_out_and_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log, "_said", {})
    from_hf("deepseek_v3", num_nextn_predict_layers=0)
    assert not log.fallbacks()
    config = from_hf("deepseek_v3", num_nextn_predict_layers=2)
    assert "2 layer(s) that predict further tokens" in log.fallbacks()["predicting layers"]
    layers = {s.layer for s in models.family("deepseek_v3").weights(config, "safetensors")}
    assert layers == {-1, 0, 1, 2}
    assert from_gguf(nextn_predict_layers=1).num_layers == 2


def test_gguf_metadata():
    config = from_gguf()
    temperature = 0.1 * math.log(4) + 1
    assert config.softmax_scale == pytest.approx(20**-0.5 * temperature**2)
    assert config.rope.scaling == YarnScaling(factor=4.0, original_context=64, attention_factor=1.0)
    assert (config.nope_head_dim, config.head_dim, config.v_head_dim) == (12, 8, 16)
    assert (config.q_lora_rank, config.kv_lora_rank, config.groups) == (28, 32, 4)
    assert (config.shared_intermediate_size, config.routed_scaling_factor) == (48, 2.5)
    assert config.dense_layers == {0}
    formed = from_gguf(
        "attention.key_length_mla", "attention.value_length_mla", attention__key_length=20,
        attention__value_length=16, attention__head_count_kv=3,
    )  # fmt: skip
    assert formed.softmax_scale == config.softmax_scale
    assert (formed.nope_head_dim, formed.v_head_dim) == (12, 16)


def test_gguf_files_that_do_not_say():
    config = from_gguf(
        "rope.scaling.yarn_log_multiplier", "expert_group_count", "expert_group_used_count",
        "expert_weights_scale", "expert_weights_norm", "attention.q_lora_rank",
    )  # fmt: skip
    assert config.softmax_scale == 20**-0.5
    assert config.rope.scaling.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert (config.groups, config.routed_scaling_factor, config.norm_topk_prob) == (1, 1.0, False)
    assert config.q_lora_rank == 0


def test_gguf_files_belong_to_one_family():
    for gating, owner in ((None, "deepseek_v2"), (1, "deepseek_v2"), (2, "deepseek_v3")):
        keys = metadata("expert_gating_func")
        if gating is not None:
            keys["deepseek2.expert_gating_func"] = gating
        claiming = [name for name, f in models.families().items() if f.claims_gguf(keys)]
        assert claiming == [owner]


def test_gguf_sizes_that_contradict_each_other():
    with pytest.raises(CheckpointError, match=r"dimension_count is 20, it should be less than"):
        from_gguf(rope__dimension_count=20)
    with pytest.raises(CheckpointError, match=r"expert groups is 5"):
        from_gguf(expert_group_count=5)
    with pytest.raises(UnsupportedArchitecture, match=r"logit_scale = 0\.5"):
        from_gguf(logit_scale=0.5)

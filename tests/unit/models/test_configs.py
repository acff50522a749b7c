"""Reading configurations: what is taken, what is assumed when absent, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from moestro import models
from moestro.core.errors import CheckpointError, UnsupportedArchitecture
from moestro.nn.kv_cache import KvShape
from moestro.nn.rope import BandScaling, LinearScaling, YarnScaling

FAMILIES = ["gpt_oss", "llama", "mixtral", "qwen2_moe", "qwen3_moe"]
LATENT = ["deepseek_v2", "deepseek_v3", "kimi_k2"]  # see test_latent_configs.py
MOE = [name for name in FAMILIES if name != "llama"]

GGUF = {
    "block_count": 2,
    "context_length": 256,
    "embedding_length": 48,
    "feed_forward_length": 40,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "vocab_size": 101,
}
GGUF_MOE = {**GGUF, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
GGUF_FAMILIES = {
    "gpt_oss": ("gpt-oss", {**GGUF_MOE, "attention.sliding_window": 7}),
    "llama": ("llama", GGUF),
    "mixtral": ("llama", GGUF_MOE),
    "qwen2_moe": ("qwen2moe", GGUF_MOE),
    "qwen3_moe": ("qwen3moe", GGUF_MOE),
}


def from_hf(model_type: str, *remove: str, **changes: Any):
    family = models.family(model_type)
    raw = {k: v for k, v in {**family.tiny(), **changes}.items() if k not in remove}
    return family.Config.from_hf(raw)


def metadata(model_type: str, *remove: str, **changes: Any) -> dict[str, Any]:
    """GGUF key/values; in ``changes`` two underscores stand for a dot."""
    architecture, keys = GGUF_FAMILIES[model_type]
    keys = {**keys, **{name.replace("__", "."): value for name, value in changes.items()}}
    own = {f"{architecture}.{k}": v for k, v in keys.items() if k not in remove}
    return {"general.architecture": architecture, "tokenizer.ggml.eos_token_id": 5, **own}


def from_gguf(model_type: str, *remove: str, **changes: Any):
    return models.family(model_type).Config.from_gguf(metadata(model_type, *remove, **changes))


def test_families_are_found_by_file_name():
    assert sorted(models.families()) == sorted([*FAMILIES, *LATENT])
    with pytest.raises(
        UnsupportedArchitecture,
        match=r"'gpt2' is not implemented; these are: .*gpt_oss, .*llama, mixtral",
    ):
        models.family("gpt2")
    for name in ("spec", "common", "upcycle"):
        with pytest.raises(UnsupportedArchitecture):
            models.family(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_is_a_configuration(name: str):
    config = from_hf(name)
    spec = config.spec()
    assert spec.model_type == name
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size) == (48, 2, 101)
    assert spec.context_length == 256
    assert spec.caches == (KvShape(kv_heads=config.num_kv_heads, head_dim=16),) * 2


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
     "max_position_embeddings"],
)  # fmt: skip
def test_missing_sizes_are_named(name: str, key: str):
    with pytest.raises(CheckpointError, match=f"{name} model: {key} is missing"):
        from_hf(name, key)


@pytest.mark.parametrize("name", MOE)
def test_missing_expert_counts_are_named(name: str):
    with pytest.raises(CheckpointError, match=r"num_(local_)?experts or num_(local_)?experts is"):
        from_hf(name, "num_experts", "num_local_experts")
    with pytest.raises(CheckpointError, match="experts per token is 9, it should be at most the"):
        from_hf(name, num_experts_per_tok=9)


@pytest.mark.parametrize("value", [0, -3, 48.5, "48", True, [48], 2**40])
def test_impossible_sizes_are_named(value: Any):
    with pytest.raises(CheckpointError, match=r"hidden_size is .*, it should be a whole number"):
        from_hf("llama", hidden_size=value)


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_must_fit(name: str):
    with pytest.raises(CheckpointError, match=r"num_key_value_heads is 2, .* divisor of .* 3"):
        from_hf(name, num_attention_heads=3, num_key_value_heads=2)
    with pytest.raises(CheckpointError, match=r"hidden_size is 48, .* multiple of .* 5"):
        from_hf(name, "head_dim", num_attention_heads=5, num_key_value_heads=5)
    with pytest.raises(UnsupportedArchitecture, match="head_dim = 15"):
        from_hf(name, head_dim=15)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type = 'longrope'"),
        ({"rope_parameters": {"rope_type": "axial"}}, "rope_type = 'axial'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one set for all"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor = 0.25"),
    ],
)
def test_unsupported_options_are_named(name: str, changes: dict[str, Any], named: str):
    with pytest.raises(UnsupportedArchitecture, match=named):
        from_hf(name, **changes)


@pytest.mark.parametrize("value", [0.0, -1e-5, float("inf"), float("nan"), "1e-5", True])
def test_impossible_numbers_are_named(value: Any):
    with pytest.raises(CheckpointError, match=r"rms_norm_eps is .*, it should be a positive"):
        from_hf("llama", rms_norm_eps=value)


def test_absurd_layer_counts_are_refused_before_they_are_counted():
    with pytest.raises(CheckpointError, match="num_hidden_layers is 2000000000"):
        from_hf("llama", num_hidden_layers=2_000_000_000)
    with pytest.raises(CheckpointError, match="block_count is 2000000000"):
        from_gguf("llama", block_count=2_000_000_000)


def test_options_of_one_family():
    with pytest.raises(UnsupportedArchitecture, match="mlp_bias = True"):
        from_hf("llama", mlp_bias=True)
    with pytest.raises(UnsupportedArchitecture, match="rope_interleaved = True"):
        from_hf("llama", rope_interleaved=True)
    assert from_hf("llama", attention_bias=True).qkv_bias
    assert from_hf("llama", attention_bias=True).output_bias
    qwen2 = from_hf("qwen2_moe")
    assert qwen2.qkv_bias and not qwen2.output_bias
    assert not from_hf("qwen2_moe", qkv_bias=False).qkv_bias
    assert from_hf("qwen3_moe").norm_topk_prob
    assert not from_hf("qwen3_moe", "norm_topk_prob").norm_topk_prob


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, set()),
        ({"mlp_only_layers": [0, 3]}, {0, 3}),
        ({"decoder_sparse_step": 2}, {0, 2, 4}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, {0, 1, 2, 4}),
        ({"num_experts": 0}, {0, 1, 2, 3, 4}),
    ],
)
def test_dense_layers(name: str, changes: dict[str, Any], dense: set[int]):
    assert from_hf(name, num_hidden_layers=5, **changes).dense_layers == dense


def test_what_gpt_oss_assumes_and_refuses():
    plain = from_hf("gpt_oss", "rope_parameters", max_position_embeddings=131072)
    assert plain.rope.theta == 150000.0 and plain.context_length == 131072
    assert plain.rope.scaling == YarnScaling(
        factor=32.0, original_context=4096, attention_factor=plain.rope.scaling.attention_factor,
        truncate=False,
    )  # fmt: skip
    assert plain.qkv_bias and plain.output_bias and plain.norm_topk_prob
    bare = from_hf("gpt_oss", attention_bias=False)
    assert not bare.qkv_bias and not bare.output_bias
    assert from_hf("gpt_oss", "num_experts_per_tok").top_k == 4
    assert from_hf("gpt_oss", "num_experts_per_tok", experts_per_token=3).top_k == 3
    five = {"num_hidden_layers": 5}
    assert from_hf("gpt_oss", **five).windows == (20, 0, 20, 0, 20)
    assert from_hf("gpt_oss", "sliding_window", **five).windows == (128, 0, 128, 0, 128)
    kinds = ["full_attention", "sliding_attention"]
    assert from_hf("gpt_oss", layer_types=kinds).windows == (0, 20)
    with pytest.raises(CheckpointError, match="layer_types"):
        from_hf("gpt_oss", layer_types=kinds[:1])
    for key, value in (("swiglu_limit", 10.0), ("swiglu_alpha", 1.0)):
        with pytest.raises(UnsupportedArchitecture, match=f"{key} = {value}"):
            from_hf("gpt_oss", **{key: value})


def test_what_gpt_oss_gguf_does_not_say():
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 32.0}
    config = from_gguf("gpt_oss", **yarn, block_count=3)
    assert not config.rope.scaling.truncate
    assert config.windows == (7, 0, 7)
    with pytest.raises(CheckpointError, match="sliding_window is missing"):
        from_gguf("gpt_oss", "attention.sliding_window")
    with pytest.raises(UnsupportedArchitecture, match="expert_weights_norm = False"):
        from_gguf("gpt_oss", expert_weights_norm=False)


def test_sliding_windows():
    assert from_hf("mixtral", sliding_window=None).windows == (0, 0)
    assert from_hf("mixtral", sliding_window=7).windows == (7, 7)
    assert from_hf("qwen3_moe", sliding_window=7).windows == (0, 0)
    assert from_hf("qwen3_moe", sliding_window=7, use_sliding_window=True).windows == (7, 7)
    qwen2 = {"use_sliding_window": True, "sliding_window": 7, "num_hidden_layers": 5}
    assert from_hf("qwen2_moe", sliding_window=7).windows == (0, 0)
    assert from_hf("qwen2_moe", **qwen2).windows == (7, 0, 7, 0, 7)
    assert from_hf("qwen2_moe", **qwen2, max_window_layers=2).windows == (7, 0, 0, 0, 0)
    kinds = ["full_attention", "sliding_attention"]
    qwen2["num_hidden_layers"] = 2
    assert from_hf("qwen2_moe", **qwen2, layer_types=kinds).windows == (0, 7)
    with pytest.raises(CheckpointError, match="layer_types"):
        from_hf("qwen2_moe", **qwen2, layer_types=["full_attention", "chunked_attention"])
    with pytest.raises(CheckpointError, match="layer_types"):
        from_hf("qwen2_moe", **qwen2, layer_types=kinds[:1])


@pytest.mark.parametrize(("value", "want"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))])
def test_eos_token_ids(value: Any, want: tuple[int, ...]):
    assert from_hf("llama", eos_token_id=value).spec().eos_token_ids == want


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
def test_both_spellings_of_rope(key: str, kind_key: str):
    linear = from_hf("llama", **{key: {kind_key: "linear", "factor": 4}})
    assert linear.rope.scaling == LinearScaling(factor=4.0)
    assert linear.rope.theta == 10000.0 and linear.context_length == 256
    bands = {"factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4,
             "original_max_position_embeddings": 64}  # fmt: skip
    assert from_hf("llama", **{key: {kind_key: "llama3", **bands}}).rope.scaling == BandScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64
    )
    dynamic = from_hf("llama", **{key: {kind_key: "dynamic", "factor": 4}})
    assert dynamic.rope.scaling is None and dynamic.context_length == 256


def test_rope_theta_is_found_in_both_places():
    assert from_hf("llama", rope_parameters={"rope_theta": 77}).rope.theta == 77.0
    assert from_hf("llama", "rope_theta").rope.theta == 10000.0
    assert from_hf("mixtral", "rope_theta").rope.theta == 1e6


def test_yarn_stretches_the_context():
    yarn = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    config = from_hf("qwen3_moe", rope_scaling=yarn)
    assert config.context_length == 512
    assert isinstance(config.rope.scaling, YarnScaling)
    assert config.rope.scaling.original_context == 64
    outside = from_hf("llama", original_max_position_embeddings=32,
                      rope_scaling={"type": "yarn", "factor": 2.0})  # fmt: skip
    assert outside.rope.scaling.original_context == 32 and outside.context_length == 256
    by_ratio = from_hf("llama", rope_scaling={**yarn, "factor": None})
    assert by_ratio.rope.scaling.factor == 4.0


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"type": "linear"}, "factor is missing"),
        ({"type": "linear", "factor": 0}, "factor is 0"),
        ({"type": "llama3", "factor": 8.0, "high_freq_factor": 4}, "low_freq_factor is missing"),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4},
         "above low_freq_factor"),
        ([1, 2], "should be an object"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0"),
        ({"type": "yarn", "factor": 2.0, "mscale": "1", "mscale_all_dim": 1}, "mscale is '1'"),
    ],
)  # fmt: skip
def test_incomplete_rope_parameters_are_named(scaling: Any, named: str):
    with pytest.raises(CheckpointError, match=named):
        from_hf("llama", rope_scaling=scaling)


@pytest.mark.parametrize("name", FAMILIES)
def test_gguf_metadata(name: str):
    config = from_gguf(name)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (48, 2, 101)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 12)
    assert config.context_length == 256 and config.rms_norm_eps == 1e-5
    assert config.eos_token_ids == (5,)
    claims = [n for n, f in models.families().items() if f.claims_gguf(metadata(name))]
    assert claims == [name]
    if name in MOE:
        assert (config.num_experts, config.top_k) == (4, 2)
        assert config.moe_intermediate_size == 24
        assert config.norm_topk_prob == (name != "qwen2_moe")


def test_gguf_of_older_converters():
    assert from_gguf("mixtral", "expert_feed_forward_length").moe_intermediate_size == 40
    assert from_gguf("qwen3_moe", "expert_feed_forward_length").moe_intermediate_size == 20
    assert from_gguf("qwen2_moe").shared_expert_intermediate_size == 40
    named = from_gguf("qwen2_moe", expert_shared_feed_forward_length=56)
    assert named.shared_expert_intermediate_size == 56
    keys = metadata("llama", "vocab_size", "attention.head_count_kv")
    with pytest.raises(CheckpointError, match=r"llama\.vocab_size is missing"):
        models.family("llama").Config.from_gguf(keys)
    keys |= {"tokenizer.ggml.tokens": ["a"] * 33, "tokenizer.ggml.eot_token_id": 6}
    config = models.family("llama").Config.from_gguf(keys)
    assert config.vocab_size == 33 and config.num_kv_heads == 4
    assert config.eos_token_ids == (5, 6)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "option",
    [
        {"attention__scale": 0.5},
        {"attention__causal": False},
        {"attn_logit_softcapping": 50.0},
        {"logit_scale": 0.25},
        {"expert_gating_func": 2},
        {"rope__dimension_count": 6},
        {"attention__value_length": 24},
        {"rope__scaling__type": "longrope", "rope__scaling__factor": 2.0},
        {"rope__scaling__attn_factor": 1.5},
        {"leading_dense_block_count": 1},
    ],
    ids=lambda option: next(iter(option)),
)
def test_gguf_options_that_change_the_result_are_refused(name: str, option: dict[str, Any]):
    key = next(iter(option)).replace("__", ".")
    with pytest.raises(UnsupportedArchitecture, match=key.replace(".", r"\.")):
        from_gguf(name, **option)


def test_gguf_options_of_one_family_are_refused():
    with pytest.raises(UnsupportedArchitecture, match="expert_weights_norm = False"):
        from_gguf("mixtral", expert_weights_norm=False)
    for name in ("mixtral", "qwen3_moe"):
        with pytest.raises(UnsupportedArchitecture, match="expert_shared_count = 1"):
            from_gguf(name, expert_shared_count=1)
    assert from_gguf("qwen2_moe", expert_weights_norm=True).norm_topk_prob


def test_gguf_values_that_vary_by_layer_are_refused():
    with pytest.raises(CheckpointError, match=r"head_count_kv is \[2, 4\]"):
        from_gguf("llama", attention__head_count_kv=[2, 4])


def test_gguf_rope():
    assert from_gguf("llama").rope.scaling is None
    assert from_gguf("llama", rope__freq_base=5e5).rope.theta == 5e5
    none = from_gguf("llama", rope__scaling__type="none", rope__scaling__factor=4.0)
    assert none.rope.scaling is None
    for key in ("rope__scaling__factor", "rope__scale_linear"):
        assert from_gguf("llama", **{key: 4.0}).rope.scaling == LinearScaling(factor=4.0)
    yarn = from_gguf(
        "llama", rope__scaling__type="yarn", rope__scaling__factor=8.0,
        rope__scaling__original_context_length=64, rope__scaling__yarn_beta_fast=16.0,
    )  # fmt: skip
    assert yarn.rope.scaling.original_context == 64 and yarn.rope.scaling.beta_fast == 16.0
    assert yarn.context_length == 512


def test_gguf_sliding_window():
    assert from_gguf("mixtral", attention__sliding_window=9).windows == (9, 9)

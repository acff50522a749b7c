"""gpt-oss: attention with sinks, every other layer in a window; biased experts, clamped SwiGLU.

Reference: transformers ``GptOssForCausalLM``. GGUF architecture ``gpt-oss``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from moestro.devices.base import Device
from moestro.memory.weights import ExpertSources, WeightSpec
from moestro.models.common.config import fields_from_gguf, fields_from_hf, windows_from_hf
from moestro.models.common.experts import (
    MoeConfig,
    build_moe,
    experts_from_gguf,
    uniform_experts,
)
from moestro.models.common.reading import Reader, gguf_reader, hf_reader
from moestro.models.common.weights import bias_specs, router_spec, sources, weight_specs
from moestro.models.spec import Container, Model, Weights
from moestro.nn.rope import RopeConfig, YarnScaling

GGUF_ARCHITECTURE = "gpt-oss"
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True)
class Config(MoeConfig):
    """norm_topk_prob is always true: the softmax is over the chosen experts' logits alone."""

    model_type: ClassVar[str] = "gpt_oss"
    attention_sinks: ClassVar[bool] = True

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Config:
        config = hf_reader(raw, cls.model_type)
        config.refuse("swiglu_alpha", 1.702)
        config.refuse("swiglu_limit", 7, 7.0)
        if config.get("rope_scaling", "rope_parameters") is None:
            raw = {**raw, "rope_parameters": _DEFAULT_ROPE}
        fields = fields_from_hf(raw, cls.model_type, default_theta=150000.0, default_eps=1e-5)
        bias = config.flag("attention_bias", default=True)
        experts = uniform_experts(
            config,
            num_experts=config.integer("num_local_experts", "num_experts"),
            top_k=config.integer("num_experts_per_tok", "experts_per_token", default=4),
            intermediate_size=config.integer("intermediate_size"),
        )
        windows = _windows_from_hf(config, fields["num_layers"])
        return cls(
            **fields | {"qkv_bias": bias, "output_bias": bias, "windows": windows},
            **experts,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Config:
        config = gguf_reader(metadata, GGUF_ARCHITECTURE)
        config.refuse("expert_shared_count", 0)
        config.refuse("expert_weights_norm", True)
        fields = fields_from_gguf(metadata, GGUF_ARCHITECTURE)
        window = config.integer("attention.sliding_window")
        layers = range(fields["num_layers"])
        return cls(
            **fields | {"windows": _alternate(window, layers), "rope": _exact_ramp(fields["rope"])},
            **experts_from_gguf(config, norm_topk_prob=True),
        )


def _windows_from_hf(config: Reader, num_layers: int) -> tuple[int, ...]:
    window = config.integer("sliding_window", default=128)
    listed = windows_from_hf(config, num_layers, window)
    return _alternate(window, range(num_layers)) if listed is None else listed


def _alternate(window: int, layers: range) -> tuple[int, ...]:
    return tuple(0 if n % 2 else window for n in layers)


def _exact_ramp(rope: RopeConfig) -> RopeConfig:
    """GGUF has no key for it, but the model's YaRN ramp does not end at whole channels."""
    if not isinstance(rope.scaling, YarnScaling):
        return rope
    return replace(rope, scaling=replace(rope.scaling, truncate=False))


def claims_gguf(metadata: Mapping[str, Any]) -> bool:
    return metadata.get("general.architecture") == GGUF_ARCHITECTURE


def weights(config: Config, container: Container) -> list[WeightSpec]:
    def feed_forward(layer: int) -> list[WeightSpec]:
        router = router_spec(layer, config.router_shape, "mlp.router")
        bias = replace(
            router,
            key=f"{router.key}.bias",
            kind="vector",
            shape=(config.num_experts,),
            sources=sources(layer, "mlp.router.bias", "ffn_gate_inp.bias"),
        )
        experts = WeightSpec(
            key=f"layers.{layer}.experts",
            kind="experts",
            role="experts",
            shape=config.experts_shape,
            expert_sources=_expert_sources(layer, container),
            activation="swiglu_oai",
            layer=layer,
        )
        biases = bias_specs(layer, config.experts_shape, container, "mlp.experts")
        return [router, bias, experts, *biases]

    return weight_specs(config, container, feed_forward, gguf_second_norm="post_attention_norm")


def _expert_sources(layer: int, container: Container) -> ExpertSources:
    if container == "gguf":
        gate, up, down = (f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
        return ExpertSources(gate=(gate,), up=(up,), down=(down,))
    at = f"model.layers.{layer}.mlp.experts"
    return ExpertSources(
        gate_up=(f"{at}.gate_up_proj",),
        down=(f"{at}.down_proj",),
        layout="interleaved_transposed",
    )


def build(config: Config, weights: Weights, device: Device, *, max_positions: int) -> Model:
    return build_moe(config, weights, device, max_positions=max_positions)


def tiny() -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            **_DEFAULT_ROPE,
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "sliding_window": 20,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    }

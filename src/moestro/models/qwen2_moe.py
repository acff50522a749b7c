"""Qwen2-MoE: a shared expert behind a sigmoid gate; queries, keys and values have a bias.

Reference: transformers ``Qwen2MoeForCausalLM``. GGUF architecture ``qwen2moe``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moestro.devices.base import Device
from moestro.memory.weights import WeightSpec
from moestro.models.common.build import Loaded
from moestro.models.common.config import fields_from_gguf, fields_from_hf, windows_from_hf
from moestro.models.common.experts import (
    MoeConfig,
    build_moe,
    dense_or,
    experts_from_gguf,
    experts_from_hf,
    router_and_experts,
)
from moestro.models.common.reading import Reader, gguf_reader, hf_reader
from moestro.models.common.weights import mlp_spec, sources, weight_specs
from moestro.models.spec import Container, Model, Weights
from moestro.nn.mlp import GatedMlp

GGUF_ARCHITECTURE = "qwen2moe"


@dataclass(frozen=True, kw_only=True)
class Config(MoeConfig):
    model_type: ClassVar[str] = "qwen2_moe"

    shared_expert_intermediate_size: int

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Config:
        config = hf_reader(raw, cls.model_type)
        fields = fields_from_hf(raw, cls.model_type, default_eps=1e-6)
        fields["qkv_bias"] = config.flag("qkv_bias", default=True)
        fields["windows"] = _windows_from_hf(config, fields["num_layers"])
        return cls(
            **fields,
            **experts_from_hf(config, num_layers=fields["num_layers"]),
            shared_expert_intermediate_size=config.integer("shared_expert_intermediate_size"),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Config:
        config = gguf_reader(metadata, GGUF_ARCHITECTURE)
        return cls(
            **fields_from_gguf(metadata, GGUF_ARCHITECTURE),
            **experts_from_gguf(config, norm_topk_prob=False),
            shared_expert_intermediate_size=config.integer(
                "expert_shared_feed_forward_length", "feed_forward_length"
            ),
        )


def _windows_from_hf(config: Reader, num_layers: int) -> tuple[int, ...]:
    """Each layer's window, by ``layer_types`` or by the rule that stands in for it."""
    if not config.flag("use_sliding_window", default=False):
        return (0,) * num_layers
    window = config.integer("sliding_window", default=4096, minimum=0)
    listed = windows_from_hf(config, num_layers, window)
    if listed is not None:
        return listed
    last = config.integer("max_window_layers", default=28, minimum=0)
    return tuple(window if n % 2 == 0 and n < last else 0 for n in range(num_layers))


def claims_gguf(metadata: Mapping[str, Any]) -> bool:
    return metadata.get("general.architecture") == GGUF_ARCHITECTURE


def weights(config: Config, container: Container) -> list[WeightSpec]:
    hidden = config.hidden_size
    shared = config.shared_expert_intermediate_size, hidden

    def sparse(layer: int) -> list[WeightSpec]:
        return [
            *router_and_experts(config, layer),
            WeightSpec(
                key=f"layers.{layer}.shared_expert_gate",
                kind="matrix",
                role="router",
                shape=(1, hidden),
                sources=sources(
                    layer, "mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight"
                ),
                layer=layer,
            ),
            mlp_spec(layer, "shared_expert", "shared", shared, "mlp.shared_expert", "_shexp"),
        ]

    return weight_specs(config, container, dense_or(config, sparse))


def build(config: Config, weights: Weights, device: Device, *, max_positions: int) -> Model:
    def shared(loaded: Loaded, layer: int) -> GatedMlp:
        at = f"layers.{layer}.shared_expert"
        return GatedMlp(gate=loaded.linear(f"{at}_gate"), bank=loaded.bank(at))

    return build_moe(config, weights, device, max_positions=max_positions, shared=shared)


def tiny() -> dict[str, Any]:
    return {
        "model_type": "qwen2_moe",
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 56,
        "norm_topk_prob": False,
    }

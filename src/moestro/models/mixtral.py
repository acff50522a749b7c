"""Mixtral: every layer routes to a few of its experts, whose weights sum to one.

Reference: transformers ``MixtralForCausalLM``. GGUF architecture ``llama`` with experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moestro.devices.base import Device
from moestro.memory.weights import WeightSpec
from moestro.models.common.config import fields_from_gguf, fields_from_hf
from moestro.models.common.experts import (
    MoeConfig,
    build_moe,
    router_and_experts,
    uniform_experts,
)
from moestro.models.common.reading import gguf_reader, hf_reader
from moestro.models.common.weights import weight_specs
from moestro.models.spec import Container, Model, Weights

GGUF_ARCHITECTURE = "llama"


@dataclass(frozen=True, kw_only=True)
class Config(MoeConfig):
    model_type: ClassVar[str] = "mixtral"

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Config:
        config = hf_reader(raw, cls.model_type)
        fields = fields_from_hf(raw, cls.model_type, default_theta=1e6, default_eps=1e-5)
        experts = uniform_experts(
            config,
            num_experts=config.integer("num_local_experts", "num_experts"),
            top_k=config.integer("num_experts_per_tok", default=2),
            intermediate_size=config.integer("intermediate_size"),
        )
        window = config.integer("sliding_window", default=0, minimum=0)
        return cls(**fields | {"windows": (window,) * fields["num_layers"]}, **experts)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Config:
        config = gguf_reader(metadata, GGUF_ARCHITECTURE)
        config.refuse("expert_weights_norm", True)
        config.refuse("expert_shared_count", 0)
        experts = uniform_experts(
            config,
            num_experts=config.integer("expert_count"),
            top_k=config.integer("expert_used_count"),
            intermediate_size=config.integer("expert_feed_forward_length", "feed_forward_length"),
        )
        return cls(**fields_from_gguf(metadata, GGUF_ARCHITECTURE), **experts)


def claims_gguf(metadata: Mapping[str, Any]) -> bool:
    experts = metadata.get(f"{GGUF_ARCHITECTURE}.expert_count", 0)
    return metadata.get("general.architecture") == GGUF_ARCHITECTURE and bool(experts)


def weights(config: Config, container: Container) -> list[WeightSpec]:
    def feed_forward(layer: int) -> list[WeightSpec]:
        return router_and_experts(
            config,
            layer,
            router=("block_sparse_moe.gate", "mlp.gate"),
            experts="block_sparse_moe.experts",
            parts=("w1", "w3", "w2"),
        )

    return weight_specs(config, container, feed_forward, gguf_interleaves_rope=True)


def build(config: Config, weights: Weights, device: Device, *, max_positions: int) -> Model:
    return build_moe(config, weights, device, max_positions=max_positions)


def tiny() -> dict[str, Any]:
    return {
        "model_type": "mixtral",
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }

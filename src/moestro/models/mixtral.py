"""Mixtral: every layer routes to a few of its experts, whose weights sum to one.

Reference: transformers ``MixtralForCausalLM``. GGUF architecture ``llama`` with experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moestro.devices.base import Device
from moestro.memory.weights import WeightSpec
from moestro.models.common.build import Loaded, build_decoder
from moestro.models.common.config import fields_from_gguf, fields_from_hf
from moestro.models.common.experts import MoeConfig, build_feed_forward, check_top_k
from moestro.models.common.reading import gguf_reader, hf_reader
from moestro.models.common.weights import routed_experts_spec, router_spec, weight_specs
from moestro.models.spec import Container, Model, Weights
from moestro.nn.mlp import FeedForward

GGUF_ARCHITECTURE = "llama"


@dataclass(frozen=True, kw_only=True)
class Config(MoeConfig):
    model_type: ClassVar[str] = "mixtral"

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Config:
        config = hf_reader(raw, cls.model_type)
        fields = fields_from_hf(raw, cls.model_type, default_theta=1e6, default_eps=1e-5)
        num_experts = config.integer("num_local_experts", "num_experts")
        top_k = config.integer("num_experts_per_tok", default=2)
        check_top_k(config, top_k, num_experts)
        window = config.integer("sliding_window", default=0, minimum=0)
        width = config.integer("intermediate_size")
        return cls(
            **fields | {"windows": (window,) * fields["num_layers"]},
            num_experts=num_experts,
            top_k=top_k,
            norm_topk_prob=True,
            intermediate_size=width,
            moe_intermediate_size=width,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Config:
        config = gguf_reader(metadata, GGUF_ARCHITECTURE)
        config.refuse("expert_weights_norm", True)
        config.refuse("expert_shared_count", 0)
        num_experts = config.integer("expert_count")
        top_k = config.integer("expert_used_count")
        check_top_k(config, top_k, num_experts)
        width = config.integer("expert_feed_forward_length", "feed_forward_length")
        return cls(
            **fields_from_gguf(metadata, GGUF_ARCHITECTURE),
            num_experts=num_experts,
            top_k=top_k,
            norm_topk_prob=True,
            intermediate_size=width,
            moe_intermediate_size=width,
        )


def claims_gguf(metadata: Mapping[str, Any]) -> bool:
    experts = metadata.get(f"{GGUF_ARCHITECTURE}.expert_count", 0)
    return metadata.get("general.architecture") == GGUF_ARCHITECTURE and bool(experts)


def weights(config: Config, container: Container) -> list[WeightSpec]:
    hidden = config.hidden_size
    shape = config.num_experts, config.moe_intermediate_size, hidden
    experts = "block_sparse_moe.experts"

    def feed_forward(layer: int) -> list[WeightSpec]:
        return [
            router_spec(layer, (config.num_experts, hidden), "block_sparse_moe.gate", "mlp.gate"),
            routed_experts_spec(layer, shape, hf=experts, gate="w1", up="w3", down="w2"),
        ]

    return weight_specs(config, container, feed_forward, gguf_interleaves_rope=True)


def build(config: Config, weights: Weights, device: Device, *, max_positions: int) -> Model:
    loaded = Loaded(weights)

    def feed_forward(layer: int) -> FeedForward:
        return build_feed_forward(config, loaded, layer)

    return build_decoder(config, loaded, device, feed_forward, max_positions=max_positions)


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

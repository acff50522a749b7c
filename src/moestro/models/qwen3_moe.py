"""Qwen3-MoE: queries and keys are normed per head; some layers may be dense.

Reference: transformers ``Qwen3MoeForCausalLM``. GGUF architecture ``qwen3moe``.
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
    dense_or,
    experts_from_gguf,
    experts_from_hf,
    router_and_experts,
)
from moestro.models.common.reading import gguf_reader, hf_reader
from moestro.models.common.weights import weight_specs
from moestro.models.spec import Container, Model, Weights

GGUF_ARCHITECTURE = "qwen3moe"


@dataclass(frozen=True, kw_only=True)
class Config(MoeConfig):
    model_type: ClassVar[str] = "qwen3_moe"
    qk_norm: ClassVar[bool] = True

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Config:
        config = hf_reader(raw, cls.model_type)
        fields = fields_from_hf(raw, cls.model_type, default_eps=1e-6)
        bias = config.flag("attention_bias", default=False)
        sliding = config.flag("use_sliding_window", default=False)
        window = config.integer("sliding_window", default=4096) if sliding else 0
        windows = (window,) * fields["num_layers"]
        return cls(
            **fields | {"qkv_bias": bias, "output_bias": bias, "windows": windows},
            **experts_from_hf(config, num_layers=fields["num_layers"]),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Config:
        config = gguf_reader(metadata, GGUF_ARCHITECTURE)
        config.refuse("expert_shared_count", 0)
        return cls(
            **fields_from_gguf(metadata, GGUF_ARCHITECTURE),
            **experts_from_gguf(config, norm_topk_prob=True),
        )


def claims_gguf(metadata: Mapping[str, Any]) -> bool:
    return metadata.get("general.architecture") == GGUF_ARCHITECTURE


def weights(config: Config, container: Container) -> list[WeightSpec]:
    def sparse(layer: int) -> list[WeightSpec]:
        return router_and_experts(config, layer)

    return weight_specs(config, container, dense_or(config, sparse))


def build(config: Config, weights: Weights, device: Device, *, max_positions: int) -> Model:
    return build_moe(config, weights, device, max_positions=max_positions)


def tiny() -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    }

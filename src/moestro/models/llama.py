"""Llama and everything of its shape (SmolLM2, ...): dense, no bias by default.

Reference: transformers ``LlamaForCausalLM``. GGUF architecture ``llama`` without experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moestro.devices.base import Device
from moestro.memory.weights import WeightSpec
from moestro.models.common.build import Loaded, build_decoder
from moestro.models.common.config import DecoderConfig, fields_from_gguf, fields_from_hf
from moestro.models.common.reading import gguf_reader, hf_reader
from moestro.models.common.weights import mlp_spec, weight_specs
from moestro.models.spec import Container, Model, Weights
from moestro.nn.mlp import Mlp

GGUF_ARCHITECTURE = "llama"


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    model_type: ClassVar[str] = "llama"

    intermediate_size: int

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Config:
        config = hf_reader(raw, cls.model_type)
        config.refuse("mlp_bias", False)
        config.refuse("rope_interleaved", False)
        bias = config.flag("attention_bias", default=False)
        return cls(
            **fields_from_hf(raw, cls.model_type, default_eps=1e-6)
            | {"qkv_bias": bias, "output_bias": bias},
            intermediate_size=config.integer("intermediate_size"),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Config:
        config = gguf_reader(metadata, GGUF_ARCHITECTURE)
        return cls(
            **fields_from_gguf(metadata, GGUF_ARCHITECTURE),
            intermediate_size=config.integer("feed_forward_length"),
        )


def claims_gguf(metadata: Mapping[str, Any]) -> bool:
    experts = metadata.get(f"{GGUF_ARCHITECTURE}.expert_count", 0)
    return metadata.get("general.architecture") == GGUF_ARCHITECTURE and not experts


def weights(config: Config, container: Container) -> list[WeightSpec]:
    shape = config.intermediate_size, config.hidden_size

    def feed_forward(layer: int) -> list[WeightSpec]:
        return [mlp_spec(layer, "mlp", "dense", shape, "mlp")]

    return weight_specs(config, container, feed_forward, gguf_interleaves_rope=True)


def build(config: Config, weights: Weights, device: Device, *, max_positions: int) -> Model:
    loaded = Loaded(weights)

    def feed_forward(layer: int) -> Mlp:
        return Mlp(bank=loaded.bank(f"layers.{layer}.mlp"))

    return build_decoder(config, loaded, device, feed_forward, max_positions=max_positions)


def tiny() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }

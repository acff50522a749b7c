"""DeepSeek-V3 and R1: latent attention, sigmoid router with a bias on the choice of experts.

Reference: transformers ``DeepseekV3ForCausalLM``. GGUF architecture ``deepseek2`` with sigmoid
gating. Long contexts: YaRN, with its temperature on the scores. Layers that predict further tokens
are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moestro.devices.base import Device
from moestro.memory.weights import WeightSpec
from moestro.models.common.latent import build_latent, latent_weights
from moestro.models.common.latent_config import (
    GGUF_ARCHITECTURE,
    Defaults,
    LatentConfig,
    groups_of,
    latent_fields_from_gguf,
    latent_fields_from_hf,
    tiny_sizes,
)
from moestro.models.common.reading import hf_reader
from moestro.models.spec import Container, Model, Weights

_SIGMOID = 2  # of expert_gating_func
_DEFAULTS = Defaults(
    first_dense=3, experts=256, shared_experts=1, moe_width=2048, top_k=8, scale=2.5
)


@dataclass(frozen=True, kw_only=True)
class Config(LatentConfig):
    model_type: ClassVar[str] = "deepseek_v3"
    scoring: ClassVar[str] = "sigmoid"

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Config:
        config = hf_reader(raw, cls.model_type)
        config.refuse("scoring_func", "sigmoid")
        config.refuse("topk_method", "noaux_tc")
        fields = latent_fields_from_hf(raw, cls.model_type, _DEFAULTS)
        groups = config.integer("n_group", default=8), config.integer("topk_group", default=4)
        return cls(
            **fields,
            norm_topk_prob=config.flag("norm_topk_prob", default=True),
            **groups_of(config, fields["num_experts"], fields["top_k"], *groups),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Config:
        return cls(**latent_fields_from_gguf(metadata))


def claims_gguf(metadata: Mapping[str, Any]) -> bool:
    gating = metadata.get(f"{GGUF_ARCHITECTURE}.expert_gating_func")
    return metadata.get("general.architecture") == GGUF_ARCHITECTURE and gating == _SIGMOID


def weights(config: Config, container: Container) -> list[WeightSpec]:
    return latent_weights(config, container)


def build(config: Config, weights: Weights, device: Device, *, max_positions: int) -> Model:
    return build_latent(config, weights, device, max_positions=max_positions)


def tiny() -> dict[str, Any]:
    return {
        "model_type": "deepseek_v3",
        **tiny_sizes(),
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
    }

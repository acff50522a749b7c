"""DeepSeek-V2 and V2-Lite: latent attention, softmax router over the best groups of experts.

Reference: transformers ``DeepseekV2ForCausalLM``. GGUF architecture ``deepseek2`` with softmax
gating. Long contexts: YaRN, with its temperature on the scores.
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
from moestro.models.common.reading import Reader, hf_reader
from moestro.models.spec import Container, Model, Weights

_SOFTMAX = 1  # of expert_gating_func
_DEFAULTS = Defaults(
    first_dense=0, experts=64, shared_experts=2, moe_width=1407, top_k=None, scale=1.0
)


@dataclass(frozen=True, kw_only=True)
class Config(LatentConfig):
    model_type: ClassVar[str] = "deepseek_v2"
    scoring: ClassVar[str] = "softmax"

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Config:
        config = hf_reader(raw, cls.model_type)
        config.refuse("mlp_bias", False)
        config.refuse("scoring_func", "softmax")
        # The released code scales the weights only if it does not normalize them, transformers
        # never normalizes, others do both; no published model asks for it.
        config.refuse("norm_topk_prob", False)
        fields = latent_fields_from_hf(raw, cls.model_type, _DEFAULTS)
        groups, top_groups = _groups_from_hf(config)
        return cls(
            **fields,
            norm_topk_prob=False,
            **groups_of(config, fields["num_experts"], fields["top_k"], groups, top_groups),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Config:
        return cls(**latent_fields_from_gguf(metadata))


def _groups_from_hf(config: Reader) -> tuple[int, int]:
    method = config.get("topk_method") or "greedy"
    if method == "greedy":
        return 1, 1
    if method == "group_limited_greedy":
        return config.integer("n_group"), config.integer("topk_group")
    raise config.unsupported("topk_method", method, "supported: greedy, group_limited_greedy")


def claims_gguf(metadata: Mapping[str, Any]) -> bool:
    # Files older than the key have softmax gating.
    gating = metadata.get(f"{GGUF_ARCHITECTURE}.expert_gating_func") or _SOFTMAX
    return metadata.get("general.architecture") == GGUF_ARCHITECTURE and gating == _SOFTMAX


def weights(config: Config, container: Container) -> list[WeightSpec]:
    return latent_weights(config, container)


def build(config: Config, weights: Weights, device: Device, *, max_positions: int) -> Model:
    return build_latent(config, weights, device, max_positions=max_positions)


def tiny() -> dict[str, Any]:
    return {
        "model_type": "deepseek_v2",
        **tiny_sizes(),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.0,
    }

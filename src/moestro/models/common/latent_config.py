"""Configurations of families with multi-head latent attention (arXiv:2405.04434,
arXiv:2412.19437), from config.json and from GGUF metadata.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from moestro.core import log
from moestro.models.common.config import fields_from_gguf, fields_from_hf
from moestro.models.common.experts import MoeConfig, check_top_k
from moestro.models.common.reading import Reader, gguf_reader, hf_reader
from moestro.nn.kv_cache import LatentShape
from moestro.nn.rope import YarnScaling

GGUF_ARCHITECTURE = "deepseek2"
# The kernels take a head's output channels sixteen at a time.
_CHANNELS = 16


@dataclass(frozen=True, kw_only=True)
class LatentConfig(MoeConfig):
    """q_lora_rank: 0 without a narrow layer before the queries. head_dim: a head's channels that
    turn; nope_head_dim: those that do not. softmax_scale: on the scores, any factor for long
    contexts inside. shared_intermediate_size: of all shared experts together, 0 without.
    attention_bias: of the projections from the residual stream and back to it.
    """

    scoring: ClassVar[str]

    q_lora_rank: int
    kv_lora_rank: int
    nope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    shared_intermediate_size: int
    routed_scaling_factor: float
    groups: int
    top_groups: int
    attention_bias: bool = False

    @property
    def layer_cache(self) -> LatentShape:
        """One compressed row for all heads."""
        return LatentShape(rank=self.kv_lora_rank, rope_dim=self.head_dim)


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What transformers assumes where config.json is silent."""

    first_dense: int
    experts: int
    shared_experts: int
    moe_width: int
    top_k: int | None
    scale: float


def latent_fields_from_hf(
    raw: Mapping[str, Any], model_type: str, defaults: Defaults
) -> dict[str, Any]:
    """Values of LatentConfig's fields but norm_topk_prob, groups and top_groups."""
    config = hf_reader(raw, model_type)
    config.refuse("moe_layer_freq", 1)
    rope_dim = config.integer("qk_rope_head_dim", default=64)
    fields = fields_from_hf({**raw, "head_dim": rope_dim}, model_type, default_eps=1e-6)
    if fields["num_kv_heads"] != fields["num_heads"]:
        heads = fields["num_kv_heads"]
        raise config.unsupported("num_key_value_heads", heads, "as many as heads are")
    fields["rope"] = replace(
        fields["rope"], interleaved=config.flag("rope_interleave", default=True)
    )
    nope = config.integer("qk_nope_head_dim", default=128)
    temperature = _temperature_from_hf(config)
    skip_predicting_layers(config.get("num_nextn_predict_layers", "num_mtp_layers"))
    return {
        **fields,
        **_experts_from_hf(config, fields["num_layers"], defaults),
        "q_lora_rank": _nullable(config, "q_lora_rank", 1536),
        **_shape(
            config,
            rank=config.integer("kv_lora_rank", default=512),
            value=config.integer("v_head_dim", default=128),
        ),
        "nope_head_dim": nope,
        "softmax_scale": (nope + rope_dim) ** -0.5 * temperature**2,
        "attention_bias": config.flag("attention_bias", default=False),
    }


def _experts_from_hf(config: Reader, layers: int, defaults: Defaults) -> dict[str, Any]:
    experts = config.integer("n_routed_experts", "num_local_experts", default=defaults.experts)
    top_k = config.integer("num_experts_per_tok", default=defaults.top_k)
    check_top_k(config, top_k, experts)
    width = config.integer("moe_intermediate_size", default=defaults.moe_width)
    first = config.integer("first_k_dense_replace", default=defaults.first_dense, minimum=0)
    shared = _nullable(config, "n_shared_experts", defaults.shared_experts)
    return {
        "num_experts": experts,
        "top_k": top_k,
        "intermediate_size": config.integer("intermediate_size"),
        "moe_intermediate_size": width,
        "dense_layers": frozenset(range(min(first, layers))),
        "shared_intermediate_size": shared * width,
        "routed_scaling_factor": config.number("routed_scaling_factor", default=defaults.scale),
    }


def _nullable(config: Reader, name: str, default: int) -> int:
    """A size that null means to leave out: 0."""
    if name in config.values and config.values[name] is None:
        return 0
    return config.integer(name, default=default, minimum=0)


def _temperature_from_hf(config: Reader) -> float:
    """The factor on queries and keys that ``mscale_all_dim`` stands for."""
    raw = config.get("rope_scaling", "rope_parameters") or {}
    rope = Reader(raw, source=f"{config.source}, rope parameters")
    kind = rope.get("rope_type", "type") or "default"
    if kind == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    weight, factor = rope.number("mscale_all_dim"), rope.number("factor")
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _shape(config: Reader, *, rank: int, value: int) -> dict[str, int]:
    for name, size in (("kv_lora_rank", rank), ("v_head_dim", value)):
        if size % _CHANNELS:
            raise config.unsupported(name, size, f"multiples of {_CHANNELS} are")
    return {"kv_lora_rank": rank, "v_head_dim": value}


def skip_predicting_layers(count: Any) -> None:
    """Say once that layers which predict further tokens are left in the file."""
    if count:
        log.warn_once(
            "predicting layers",
            f"this model comes with {count} layer(s) that predict further tokens; they are not "
            "read, and text is generated one token per step",
        )


# Options that these families read themselves.
_GGUF_READS = (
    "expert_gating_func",
    "expert_group_count",
    "expert_weights_scale",
    "leading_dense_block_count",
    "nextn_predict_layers",
)


def latent_fields_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Values of LatentConfig's fields, from the metadata that llama.cpp's converter writes.

    Files from before it split the key and value projections call the sizes of formed keys and
    values ``key_length`` and ``value_length``; newer ones ``key_length_mla``, ``value_length_mla``.
    """
    config = gguf_reader(metadata, GGUF_ARCHITECTURE)
    key = config.integer("attention.key_length_mla", "attention.key_length")
    value = config.integer("attention.value_length_mla", "attention.value_length")
    rope_dim = config.integer("rope.dimension_count")
    if rope_dim >= key:
        raise config.wrong("rope.dimension_count", rope_dim, f"less than the key length, {key}")
    at, log_multiplier = config.prefix, config.get("rope.scaling.yarn_log_multiplier") or 0.0
    predicting = config.integer("nextn_predict_layers", default=0, minimum=0)
    skip_predicting_layers(predicting)
    plain = {
        **metadata,
        f"{at}attention.key_length": rope_dim,
        f"{at}attention.value_length": rope_dim,
        f"{at}rope.scaling.yarn_log_multiplier": 0.0,
        f"{at}block_count": config.integer("block_count") - predicting,
    }
    fields = fields_from_gguf(plain, GGUF_ARCHITECTURE, reads=_GGUF_READS)
    rope, temperature = replace(fields["rope"], interleaved=True), 1.0
    if log_multiplier and isinstance(rope.scaling, YarnScaling):
        # The multiplier is a tenth of mscale_all_dim; mscale, which the file does not say, is taken
        # to be the same, and then nothing is left of it on cos and sin.
        temperature = 1.0 + config.number("rope.scaling.yarn_log_multiplier") * math.log(
            rope.scaling.factor
        )
        rope = replace(rope, scaling=replace(rope.scaling, attention_factor=1.0))
    return {
        **fields,
        **_experts_from_gguf(config, fields["num_layers"]),
        "rope": rope,
        "q_lora_rank": config.integer("attention.q_lora_rank", default=0, minimum=0),
        **_shape(config, rank=config.integer("attention.kv_lora_rank"), value=value),
        "nope_head_dim": key - rope_dim,
        "softmax_scale": key**-0.5 * temperature**2,
    }


def _experts_from_gguf(config: Reader, layers: int) -> dict[str, Any]:
    experts, top_k = config.integer("expert_count"), config.integer("expert_used_count")
    check_top_k(config, top_k, experts)
    width = config.integer("expert_feed_forward_length")
    first = config.integer("leading_dense_block_count", default=0, minimum=0)
    groups = config.get("expert_group_count") or 1
    return {
        "num_experts": experts,
        "top_k": top_k,
        "norm_topk_prob": config.flag("expert_weights_norm", default=False),
        "intermediate_size": config.integer("feed_forward_length", default=width),
        "moe_intermediate_size": width,
        "dense_layers": frozenset(range(min(first, layers))),
        "shared_intermediate_size": width
        * config.integer("expert_shared_count", default=0, minimum=0),
        "routed_scaling_factor": float(config.get("expert_weights_scale") or 1.0),
        **groups_of(config, experts, top_k, groups, config.get("expert_group_used_count") or 1),
    }


def groups_of(
    config: Reader, experts: int, top_k: int, groups: int, top_groups: int
) -> dict[str, Any]:
    """groups and top_groups. Raises CheckpointError for ones that experts cannot be chosen from."""
    if experts % groups:
        raise config.wrong("expert groups", groups, f"a divisor of the {experts} experts")
    if not 1 <= top_groups <= groups:
        raise config.wrong("expert groups per token", top_groups, f"1 to {groups}")
    if experts // groups * top_groups < top_k:
        raise config.wrong(
            "experts per token", top_k, f"at most the {experts // groups * top_groups} experts of "
            f"{top_groups} groups"
        )  # fmt: skip
    return {"groups": groups, "top_groups": top_groups}


def tiny_sizes() -> dict[str, Any]:
    """What the tiny configurations of families with latent attention have in common."""
    return {
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 28,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "first_k_dense_replace": 1,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
    }

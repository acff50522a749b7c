"""Rope parameters as config.json (old and new style) and GGUF metadata write them.

What the names mean is taken from transformers' ``modeling_rope_utils`` and llama.cpp's hparams.
"""

from __future__ import annotations

from collections.abc import Mapping

from moestro.models.common.reading import Reader
from moestro.nn.rope import (
    BandScaling,
    LinearScaling,
    RopeConfig,
    Scaling,
    YarnScaling,
    yarn_attention_factor,
)


def rope_from_hf(config: Reader, *, head_dim: int, default_theta: float) -> RopeConfig:
    """From ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``."""
    raw = config.get("rope_scaling", "rope_parameters") or {}
    if not isinstance(raw, Mapping):
        raise config.wrong("rope_parameters", raw, "an object")
    if any(isinstance(value, Mapping) for value in raw.values()):
        raise config.unsupported("rope_parameters", dict(raw), "one set for all layers is")
    rope = Reader(raw, source=f"{config.source}, rope parameters")
    theta = rope.number("rope_theta", default=config.number("rope_theta", default=default_theta))
    if theta <= 1:
        raise rope.wrong("rope_theta", theta, "above 1")
    rope.refuse("partial_rotary_factor", 1, 1.0)
    config.refuse("partial_rotary_factor", 1, 1.0)
    return RopeConfig(theta=theta, rotary_dim=head_dim, scaling=_scaling_from_hf(config, rope))


def _scaling_from_hf(config: Reader, rope: Reader) -> Scaling | None:
    kind = rope.get("rope_type", "type") or "default"
    # Dynamic NTK changes nothing up to max_position_embeddings, and that is where contexts end.
    if kind in ("default", "dynamic"):
        return None
    if kind == "linear":
        return LinearScaling(factor=rope.number("factor"))
    trained = config.integer("max_position_embeddings")
    inside = rope.integer("original_max_position_embeddings", default=trained)
    original = config.integer("original_max_position_embeddings", default=inside)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise rope.wrong("high_freq_factor", high, f"above low_freq_factor, {low}")
        return BandScaling(
            factor=rope.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_context=original,
        )
    if kind == "yarn":
        factor = rope.number("factor", default=trained / original)
        mscale, all_dim = (
            rope.number(name) if rope.get(name) else None for name in ("mscale", "mscale_all_dim")
        )
        recommended = yarn_attention_factor(factor, mscale, all_dim)
        return YarnScaling(
            factor=factor,
            original_context=original,
            attention_factor=rope.number("attention_factor", default=recommended),
            beta_fast=rope.number("beta_fast", default=32.0),
            beta_slow=rope.number("beta_slow", default=1.0),
            truncate=rope.flag("truncate", default=True),
        )
    raise rope.unsupported("rope_type", kind, "supported: default, linear, dynamic, llama3, yarn")


def rope_from_gguf(metadata: Reader, *, head_dim: int) -> RopeConfig:
    """From ``{arch}.rope.*``."""
    metadata.refuse("rope.dimension_count", head_dim)
    metadata.refuse("rope.dimension_sections")
    for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        metadata.refuse(name, 1.0)
    metadata.refuse("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    metadata.refuse("rope.scaling.yarn_log_multiplier", 0.0)
    theta = metadata.number("rope.freq_base", default=10000.0)
    if theta <= 1:
        raise metadata.wrong("rope.freq_base", theta, "above 1")
    return RopeConfig(
        theta=theta,
        rotary_dim=head_dim,
        scaling=_scaling_from_gguf(metadata),
    )


def _scaling_from_gguf(metadata: Reader) -> Scaling | None:
    # A factor without a type means linear; zero means none.
    kind = metadata.get("rope.scaling.type") or "linear"
    factor = metadata.get("rope.scaling.factor", "rope.scale_linear") or 1.0
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    factor = metadata.number("rope.scaling.factor", "rope.scale_linear")
    if kind == "linear":
        return LinearScaling(factor=factor)
    if kind == "yarn":
        trained = metadata.integer("context_length")
        return YarnScaling(
            factor=factor,
            original_context=metadata.integer(
                "rope.scaling.original_context_length", default=trained
            ),
            attention_factor=yarn_attention_factor(factor),
            beta_fast=metadata.number("rope.scaling.yarn_beta_fast", default=32.0),
            beta_slow=metadata.number("rope.scaling.yarn_beta_slow", default=1.0),
        )
    raise metadata.unsupported("rope.scaling.type", kind, "supported: none, linear, yarn")


def context_length(trained: int, rope: RopeConfig) -> int:
    """Positions a model is good for: what it declares, or what its scaling stretches it to."""
    if isinstance(rope.scaling, YarnScaling):
        return max(trained, int(rope.scaling.original_context * rope.scaling.factor))
    return trained

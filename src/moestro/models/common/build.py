"""Wiring of loaded weights into a decoder-only model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from moestro.core.errors import CheckpointError
from moestro.devices.base import Device
from moestro.memory.expert_bank import ExpertBank
from moestro.models.common.config import DecoderConfig
from moestro.models.spec import ModelSpec, Weights
from moestro.nn.attention import Attention, GroupedQueryAttention
from moestro.nn.buffers import Buffers
from moestro.nn.decoder import Decoder, DecoderLayer
from moestro.nn.embedding import Embedding, LanguageModelHead
from moestro.nn.linear import Linear
from moestro.nn.mlp import Experts, FeedForward
from moestro.nn.norm import RMSNorm
from moestro.nn.rope import Rope
from moestro.ops.contracts import Batch, ExpertBiases, LayerCache, Packed


@dataclass(frozen=True, kw_only=True)
class DecoderModel:
    """A decoder on a device (``models.spec.Model``)."""

    spec: ModelSpec
    decoder: Decoder
    device: Device

    def allocate_cache(self, *, pages: int, page_size: int, dtype: torch.dtype) -> list[LayerCache]:
        return self.decoder.allocate_cache(pages=pages, page_size=page_size, dtype=dtype)

    def allocate_buffers(self, *, tokens: int, logits: int) -> Buffers:
        return self.decoder.allocate_buffers(tokens=tokens, logits=logits)

    def forward(self, batch: Batch, cache: Sequence[LayerCache], buffers: Buffers) -> None:
        self.decoder.forward(self.device.ops, batch, cache, buffers)


class Loaded:
    """Loaded weights by key. Their presence and kinds have been checked against the specs."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def linear(self, key: str) -> Linear:
        """The matrix and, if there is one, its bias."""
        bias = self._weights.get(f"{key}.bias")
        return Linear(weight=self.matrix(key), bias=cast("Tensor | None", bias))

    def matrix(self, key: str) -> Packed:
        return cast(Packed, self._get(key))

    def vector(self, key: str) -> Tensor:
        return cast(Tensor, self._get(key))

    def bank(self, key: str) -> Experts:
        """The experts and, if there are any, their biases (see ``weights.bias_specs``)."""
        bank = cast(ExpertBank, self._get(key))
        if self.has(f"{key}.down_bias"):
            bank.set_biases(self._biases(key))
        return bank

    def _biases(self, key: str) -> ExpertBiases:
        if self.has(f"{key}.gate_up_bias"):
            both = self.vector(f"{key}.gate_up_bias")
            gate, up = both[:, 0::2].contiguous(), both[:, 1::2].contiguous()
        else:
            gate, up = self.vector(f"{key}.gate_bias"), self.vector(f"{key}.up_bias")
        return ExpertBiases(gate=gate, up=up, down=self.vector(f"{key}.down_bias"))

    def has(self, key: str) -> bool:
        return key in self._weights

    def _get(self, key: str) -> Packed | Tensor | Experts:
        if key not in self._weights:
            raise CheckpointError(f"the weight {key} was not loaded")
        return self._weights[key]


#: makes a layer's attention, given the model's rope
AttentionOf = Callable[[int, Rope], Attention[Any]]


def build_decoder(
    config: DecoderConfig,
    loaded: Loaded,
    device: Device,
    feed_forward: Callable[[int], FeedForward],
    *,
    max_positions: int,
    attention: AttentionOf | None = None,
) -> DecoderModel:
    """Wire a decoder; ``feed_forward(layer)`` makes each layer's block, ``attention`` its
    attention if that is not over grouped queries.
    """
    divisors = loaded.vector("rope_divisors") if loaded.has("rope_divisors") else None
    rope = Rope.build(config.rope, max_positions=max_positions, frequency_divisors=divisors)

    def norm(key: str) -> RMSNorm:
        return RMSNorm(weight=loaded.vector(key), eps=config.rms_norm_eps)

    def grouped_queries(layer: int, rope: Rope) -> GroupedQueryAttention:
        return _grouped_queries(config, loaded, layer, rope)

    make_attention = attention or grouped_queries

    def layer(n: int) -> DecoderLayer:
        at = f"layers.{n}"
        return DecoderLayer(
            input_norm=norm(f"{at}.input_norm"),
            attention=make_attention(n, rope),
            post_attention_norm=norm(f"{at}.post_attention_norm"),
            feed_forward=feed_forward(n),
        )

    tied = not loaded.has("lm_head")
    decoder = Decoder(
        embedding=Embedding(weight=loaded.matrix("embed_tokens")),
        layers=[layer(n) for n in range(config.num_layers)],
        head=LanguageModelHead(
            norm=norm("norm"), proj=loaded.linear("embed_tokens" if tied else "lm_head")
        ),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )
    spec = replace(config.spec(), context_length=max_positions)
    return DecoderModel(spec=spec, decoder=decoder, device=device)


def _grouped_queries(
    config: DecoderConfig, loaded: Loaded, layer: int, rope: Rope
) -> GroupedQueryAttention:
    at, qk_norm = f"layers.{layer}.attention", config.qk_norm

    def norm(key: str, groups: int) -> RMSNorm:
        return RMSNorm(weight=loaded.vector(key), eps=config.rms_norm_eps, groups=groups)

    return GroupedQueryAttention(
        q_proj=loaded.linear(f"{at}.q_proj"),
        k_proj=loaded.linear(f"{at}.k_proj"),
        v_proj=loaded.linear(f"{at}.v_proj"),
        o_proj=loaded.linear(f"{at}.o_proj"),
        q_norm=norm(f"{at}.q_norm", config.num_heads) if qk_norm else None,
        k_norm=norm(f"{at}.k_norm", config.num_kv_heads) if qk_norm else None,
        rope=rope,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        window=config.windows[layer],
        sinks=loaded.vector(f"{at}.sinks") if config.attention_sinks else None,
    )

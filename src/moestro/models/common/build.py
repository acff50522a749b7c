"""Wiring of loaded weights into a decoder-only model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from moestro.core.errors import CheckpointError
from moestro.devices.base import Device
from moestro.memory.expert_bank import ExpertBank
from moestro.models.common.config import DecoderConfig
from moestro.models.spec import ModelSpec, Weights
from moestro.nn.attention import GroupedQueryAttention
from moestro.nn.buffers import Buffers
from moestro.nn.decoder import Decoder, DecoderLayer
from moestro.nn.embedding import Embedding, LanguageModelHead
from moestro.nn.kv_cache import allocate_kv
from moestro.nn.linear import Linear
from moestro.nn.mlp import Experts, FeedForward
from moestro.nn.norm import RMSNorm
from moestro.nn.rope import Rope
from moestro.ops.contracts import Batch, ExpertBiases, KvLayer, Packed


@dataclass(frozen=True, kw_only=True)
class DecoderModel:
    """A decoder on a device (``models.spec.Model``)."""

    spec: ModelSpec
    decoder: Decoder
    device: Device

    def allocate_cache(self, *, pages: int, page_size: int, dtype: torch.dtype) -> list[KvLayer]:
        return [
            allocate_kv(
                pages=pages,
                page_size=page_size,
                kv_heads=self.spec.kv_heads,
                head_dim=self.spec.head_dim,
                dtype=dtype,
            )
            for _ in range(self.spec.num_layers)
        ]

    def allocate_buffers(self, *, tokens: int, logits: int) -> Buffers:
        return self.decoder.allocate_buffers(tokens=tokens, logits=logits)

    def forward(self, batch: Batch, cache: Sequence[KvLayer], buffers: Buffers) -> None:
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


def build_decoder(
    config: DecoderConfig,
    loaded: Loaded,
    device: Device,
    feed_forward: Callable[[int], FeedForward],
    *,
    max_positions: int,
) -> DecoderModel:
    """Wire a decoder; ``feed_forward(layer)`` makes each layer's block."""
    divisors = loaded.vector("rope_divisors") if loaded.has("rope_divisors") else None
    rope = Rope.build(config.rope, max_positions=max_positions, frequency_divisors=divisors)
    eps = config.rms_norm_eps

    def norm(key: str, groups: int = 1) -> RMSNorm:
        return RMSNorm(weight=loaded.vector(key), eps=eps, groups=groups)

    def layer(n: int) -> DecoderLayer:
        at = f"layers.{n}"
        qk_norm = config.qk_norm
        attention = GroupedQueryAttention(
            q_proj=loaded.linear(f"{at}.attention.q_proj"),
            k_proj=loaded.linear(f"{at}.attention.k_proj"),
            v_proj=loaded.linear(f"{at}.attention.v_proj"),
            o_proj=loaded.linear(f"{at}.attention.o_proj"),
            q_norm=norm(f"{at}.attention.q_norm", config.num_heads) if qk_norm else None,
            k_norm=norm(f"{at}.attention.k_norm", config.num_kv_heads) if qk_norm else None,
            rope=rope,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            window=config.windows[n],
            sinks=loaded.vector(f"{at}.attention.sinks") if config.attention_sinks else None,
        )
        return DecoderLayer(
            input_norm=norm(f"{at}.input_norm"),
            attention=attention,
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

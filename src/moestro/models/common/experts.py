"""What families with routed experts share: their extra configuration fields, their weights and
their wiring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moestro.devices.base import Device
from moestro.memory.weights import WeightSpec
from moestro.models.common.build import Loaded, build_decoder
from moestro.models.common.config import DecoderConfig
from moestro.models.common.reading import Reader
from moestro.models.common.weights import mlp_spec, routed_experts_spec, router_spec
from moestro.models.spec import Model, Weights
from moestro.nn.mlp import FeedForward, Mlp, SharedExpert
from moestro.nn.moe import MixtureOfExperts
from moestro.nn.router import Router


@dataclass(frozen=True, kw_only=True)
class MoeConfig(DecoderConfig):
    """intermediate_size: of dense layers. moe_intermediate_size: of one routed expert.

    dense_layers: layers with a plain feed-forward block in place of experts.
    """

    num_experts: int
    top_k: int
    norm_topk_prob: bool
    intermediate_size: int
    moe_intermediate_size: int
    dense_layers: frozenset[int] = frozenset()

    @property
    def router_shape(self) -> tuple[int, int]:
        return self.num_experts, self.hidden_size

    @property
    def experts_shape(self) -> tuple[int, int, int]:
        """(experts, moe_intermediate_size, hidden_size)"""
        return self.num_experts, self.moe_intermediate_size, self.hidden_size


def experts_from_hf(config: Reader, *, num_layers: int) -> dict[str, Any]:
    """Fields of MoeConfig in the naming of families with dense layers among sparse ones.

    ``mlp_only_layers`` and ``decoder_sparse_step`` say which layers have no experts.
    """
    # Newer transformers write num_experts as num_local_experts.
    num_experts = config.integer("num_experts", "num_local_experts", minimum=0)
    top_k = config.integer("num_experts_per_tok")
    check_top_k(config, top_k, num_experts)
    step = config.integer("decoder_sparse_step", default=1)
    listed = config.integers("mlp_only_layers")
    dense = frozenset(
        n for n in range(num_layers) if n in listed or num_experts == 0 or (n + 1) % step
    )
    return {
        "num_experts": num_experts,
        "top_k": top_k,
        "norm_topk_prob": config.flag("norm_topk_prob", default=False),
        "intermediate_size": config.integer("intermediate_size"),
        "moe_intermediate_size": config.integer("moe_intermediate_size"),
        "dense_layers": dense,
    }


def experts_from_gguf(config: Reader, *, norm_topk_prob: bool) -> dict[str, Any]:
    """Fields of MoeConfig. norm_topk_prob: what the family does when the file does not say."""
    num_experts, top_k = config.integer("expert_count"), config.integer("expert_used_count")
    check_top_k(config, top_k, num_experts)
    # Files older than expert_feed_forward_length count the active experts' width together.
    dense = config.integer("feed_forward_length", default=0, minimum=0)
    width = config.integer("expert_feed_forward_length", default=dense // top_k or None)
    return {
        "num_experts": num_experts,
        "top_k": top_k,
        "norm_topk_prob": config.flag("expert_weights_norm", default=norm_topk_prob),
        "intermediate_size": dense or width,
        "moe_intermediate_size": width,
    }


def uniform_experts(
    config: Reader, *, num_experts: int, top_k: int, intermediate_size: int
) -> dict[str, Any]:
    """Fields of MoeConfig where every layer has experts and a token's weights sum to one.

    Raises CheckpointError if more experts are to be chosen than there are.
    """
    check_top_k(config, top_k, num_experts)
    return {
        "num_experts": num_experts,
        "top_k": top_k,
        "norm_topk_prob": True,
        "intermediate_size": intermediate_size,
        "moe_intermediate_size": intermediate_size,
    }


def check_top_k(config: Reader, top_k: int, num_experts: int) -> None:
    """Raise CheckpointError if more experts are to be chosen than there are."""
    if num_experts and top_k > num_experts:
        raise config.wrong("experts per token", top_k, f"at most the {num_experts} experts")


def router_and_experts(
    config: MoeConfig,
    layer: int,
    *,
    router: tuple[str, ...] = ("mlp.gate",),
    experts: str = "mlp.experts",
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[WeightSpec]:
    """The router and the routed experts of a layer, by their names in safetensors below the layer:
    the router's, the experts', and those of gate, up and down below one expert.
    """
    gate, up, down = parts
    return [
        router_spec(layer, config.router_shape, *router),
        routed_experts_spec(layer, config.experts_shape, hf=experts, gate=gate, up=up, down=down),
    ]


def dense_or(
    config: MoeConfig, sparse: Callable[[int], list[WeightSpec]]
) -> Callable[[int], list[WeightSpec]]:
    """``feed_forward`` of ``weight_specs``: one block in dense layers, else ``sparse(layer)``."""

    def feed_forward(layer: int) -> list[WeightSpec]:
        if layer not in config.dense_layers:
            return sparse(layer)
        return [
            mlp_spec(layer, "mlp", "dense", (config.intermediate_size, config.hidden_size), "mlp")
        ]

    return feed_forward


def build_feed_forward(
    config: MoeConfig,
    loaded: Loaded,
    layer: int,
    *,
    shared: SharedExpert | None = None,
    router: Router | None = None,
) -> FeedForward:
    """The layer's dense block, or its router (with softmax scores if none is given), experts and
    shared expert.
    """
    at = f"layers.{layer}"
    if layer in config.dense_layers:
        return Mlp(bank=loaded.bank(f"{at}.mlp"))
    if router is None:
        gate = loaded.linear(f"{at}.router")
        router = Router(gate=gate, top_k=config.top_k, normalize=config.norm_topk_prob)
    return MixtureOfExperts(router=router, experts=loaded.bank(f"{at}.experts"), shared=shared)


def build_moe(
    config: MoeConfig,
    weights: Weights,
    device: Device,
    *,
    max_positions: int,
    shared: Callable[[Loaded, int], SharedExpert] | None = None,
) -> Model:
    """The model over loaded weights; ``shared(loaded, layer)`` makes the shared expert of a layer
    with routed ones.
    """
    loaded = Loaded(weights)

    def feed_forward(layer: int) -> FeedForward:
        if shared is None or layer in config.dense_layers:
            return build_feed_forward(config, loaded, layer)
        return build_feed_forward(config, loaded, layer, shared=shared(loaded, layer))

    return build_decoder(config, loaded, device, feed_forward, max_positions=max_positions)

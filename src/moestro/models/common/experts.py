"""What families with routed experts share: their extra configuration fields and their wiring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moestro.models.common.build import Loaded
from moestro.models.common.config import DecoderConfig
from moestro.models.common.reading import Reader
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


def check_top_k(config: Reader, top_k: int, num_experts: int) -> None:
    """Raise CheckpointError if more experts are to be chosen than there are."""
    if num_experts and top_k > num_experts:
        raise config.wrong("experts per token", top_k, f"at most the {num_experts} experts")


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

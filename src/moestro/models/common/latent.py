"""What families with multi-head latent attention share: their weights and their wiring. Their
configurations are in ``latent_config``.
"""

from __future__ import annotations

from dataclasses import replace

from moestro.devices.base import Device
from moestro.memory.weights import HeadRows, WeightSpec
from moestro.models.common.build import Loaded, build_decoder
from moestro.models.common.experts import build_feed_forward, dense_or, router_and_experts
from moestro.models.common.latent_config import LatentConfig
from moestro.models.common.weights import mlp_spec, norm_spec, sources, weight_specs
from moestro.models.spec import Container, Model, Weights
from moestro.nn.latent_attention import LatentAttention, QueryLora
from moestro.nn.linear import Linear
from moestro.nn.mlp import FeedForward, Mlp
from moestro.nn.norm import RMSNorm
from moestro.nn.rope import Rope
from moestro.nn.router import Router

# The norms inside the projections do not follow rms_norm_eps.
_LORA_EPS = 1e-6


def latent_weights(config: LatentConfig, container: Container) -> list[WeightSpec]:
    """Every weight of the model, in execution order."""

    def attention(layer: int) -> list[WeightSpec]:
        return [*_query_specs(config, layer), *_row_specs(config, layer)]

    def sparse(layer: int) -> list[WeightSpec]:
        router, experts = router_and_experts(config, layer)
        specs = [router]
        if config.scoring == "sigmoid":
            specs.append(
                WeightSpec(
                    key=f"layers.{layer}.router.choice_bias",
                    kind="vector",
                    role="router",
                    shape=(config.num_experts,),
                    sources=sources(layer, "mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
                    layer=layer,
                )
            )
        specs.append(experts)
        if config.shared_intermediate_size:
            shared = config.shared_intermediate_size, config.hidden_size
            specs.append(
                mlp_spec(layer, "shared_expert", "shared", shared, "mlp.shared_experts", "_shexp")
            )
        return specs

    return weight_specs(config, container, dense_or(config, sparse), attention=attention)


def _matrix(
    layer: int, name: str, shape: tuple[int, int], hf: str, gguf: str, *, bias: bool = False
) -> list[WeightSpec]:
    weight = WeightSpec(
        key=f"layers.{layer}.attention.{name}",
        kind="matrix",
        role="attention",
        shape=shape,
        sources=sources(layer, f"self_attn.{hf}.weight", f"{gguf}.weight"),
        layer=layer,
    )
    if not bias:
        return [weight]
    names = sources(layer, f"self_attn.{hf}.bias", f"{gguf}.bias")
    key = f"{weight.key}.bias"
    return [weight, replace(weight, key=key, kind="vector", shape=shape[:1], sources=names)]


def _query_specs(config: LatentConfig, layer: int) -> list[WeightSpec]:
    hidden, rank = config.hidden_size, config.q_lora_rank
    width = config.num_heads * (config.nope_head_dim + config.head_dim)
    if not rank:
        return _matrix(layer, "q_proj", (width, hidden), "q_proj", "attn_q")
    bias = config.attention_bias
    return [
        *_matrix(layer, "q_down", (rank, hidden), "q_a_proj", "attn_q_a", bias=bias),
        norm_spec(layer, "attention.q_norm", rank, "self_attn.q_a_layernorm", "attn_q_a_norm"),
        *_matrix(layer, "q_proj", (width, rank), "q_b_proj", "attn_q_b"),
    ]


def _row_specs(config: LatentConfig, layer: int) -> list[WeightSpec]:
    """What makes rows, and what reads them: the keys' and values' projections, which are one tensor
    in most files.
    """
    heads, rank, hidden = config.num_heads, config.kv_lora_rank, config.hidden_size
    nope, value, bias = config.nope_head_dim, config.v_head_dim, config.attention_bias
    key_rows = HeadRows(
        sources=sources(layer, "self_attn.kv_b_proj.weight", "attn_kv_b.weight"),
        heads=heads,
        rows=nope + value,
        first=0,
        count=nope,
        transposed=True,
    )
    value_rows = replace(key_rows, first=nope, count=value, transposed=False)
    (key,) = _matrix(layer, "key_proj", (heads * rank, nope), "", "")
    (value_proj,) = _matrix(layer, "value_proj", (heads * value, rank), "", "")
    row, output = "kv_a_proj_with_mqa", (hidden, heads * value)
    return [
        *_matrix(layer, "kv_proj", (rank + config.head_dim, hidden), row, "attn_kv_a_mqa",
                 bias=bias),
        norm_spec(layer, "attention.kv_norm", rank, "self_attn.kv_a_layernorm", "attn_kv_a_norm"),
        replace(key, sources=(f"blk.{layer}.attn_k_b.weight",), head_rows=key_rows),
        replace(value_proj, sources=(f"blk.{layer}.attn_v_b.weight",), head_rows=value_rows),
        *_matrix(layer, "o_proj", output, "o_proj", "attn_output", bias=bias),
    ]  # fmt: skip


def build_latent(
    config: LatentConfig, weights: Weights, device: Device, *, max_positions: int
) -> Model:
    """The model over loaded weights."""
    loaded = Loaded(weights)

    def attention(layer: int, rope: Rope) -> LatentAttention:
        return _attention(config, loaded, layer, rope)

    def feed_forward(layer: int) -> FeedForward:
        if layer in config.dense_layers:
            return build_feed_forward(config, loaded, layer)
        at = f"layers.{layer}"
        shared = (
            Mlp(bank=loaded.bank(f"{at}.shared_expert"))
            if config.shared_intermediate_size
            else None
        )
        bias = f"{at}.router.choice_bias"
        router = Router(
            gate=Linear(weight=loaded.matrix(f"{at}.router")),
            top_k=config.top_k,
            normalize=config.norm_topk_prob,
            scoring=config.scoring,
            choice_bias=loaded.vector(bias) if loaded.has(bias) else None,
            groups=config.groups,
            top_groups=config.top_groups,
            scale=config.routed_scaling_factor,
        )
        return build_feed_forward(config, loaded, layer, shared=shared, router=router)

    return build_decoder(
        config, loaded, device, feed_forward, max_positions=max_positions, attention=attention
    )


def _attention(config: LatentConfig, loaded: Loaded, layer: int, rope: Rope) -> LatentAttention:
    at = f"layers.{layer}.attention"

    def norm(name: str) -> RMSNorm:
        return RMSNorm(weight=loaded.vector(f"{at}.{name}"), eps=_LORA_EPS)

    lora = None
    if config.q_lora_rank:
        lora = QueryLora(down=loaded.linear(f"{at}.q_down"), norm=norm("q_norm"))
    return LatentAttention(
        q_proj=loaded.linear(f"{at}.q_proj"),
        kv_proj=loaded.linear(f"{at}.kv_proj"),
        kv_norm=norm("kv_norm"),
        key_proj=loaded.matrix(f"{at}.key_proj"),
        value_proj=loaded.matrix(f"{at}.value_proj"),
        o_proj=loaded.linear(f"{at}.o_proj"),
        rope=rope,
        heads=config.num_heads,
        scale=config.softmax_scale,
        q_lora=lora,
    )

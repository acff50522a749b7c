"""The weights that decoder-only families share, with their names in safetensors and in GGUF."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from moestro.memory.weights import ExpertSources, WeightSpec
from moestro.models.common.config import DecoderConfig
from moestro.models.spec import Container


def weight_specs(
    config: DecoderConfig,
    container: Container,
    feed_forward: Callable[[int], Sequence[WeightSpec]],
    *,
    gguf_interleaves_rope: bool = False,
    gguf_second_norm: str = "ffn_norm",
    attention: Callable[[int], Sequence[WeightSpec]] | None = None,
) -> list[WeightSpec]:
    """All weights of a decoder; ``feed_forward(layer)`` gives those after each layer's norm.

    gguf_interleaves_rope: the family's GGUF files hold q and k rows in pair order, and may hold
    rope frequency divisors. gguf_second_norm: what they call the norm after attention.
    attention: a layer's weights between its norms, if not those of grouped-query attention.
    """
    from_gguf = container == "gguf"
    hidden, vocab = config.hidden_size, config.vocab_size
    specs = [
        WeightSpec(key="embed_tokens", kind="matrix", role="embedding", shape=(vocab, hidden),
                   sources=("model.embed_tokens.weight", "token_embd.weight"))
    ]  # fmt: skip
    if from_gguf and gguf_interleaves_rope:
        specs.append(
            WeightSpec(key="rope_divisors", kind="vector", role="norm", optional=True,
                       shape=(config.rope.rotary_dim // 2,), sources=("rope_freqs.weight",))
        )  # fmt: skip
    for layer in range(config.num_layers):
        specs.append(norm_spec(layer, "input_norm", hidden, "input_layernorm", "attn_norm"))
        if attention is not None:
            specs += attention(layer)
        else:
            specs += _attention_specs(config, layer, from_gguf, from_gguf and gguf_interleaves_rope)
        specs.append(
            norm_spec(layer, "post_attention_norm", hidden, "post_attention_layernorm",
                      gguf_second_norm)
        )  # fmt: skip
        specs += feed_forward(layer)
    specs.append(
        WeightSpec(key="norm", kind="vector", role="norm", shape=(hidden,),
                   sources=("model.norm.weight", "output_norm.weight"))
    )  # fmt: skip
    if not config.tie_word_embeddings:
        specs.append(
            WeightSpec(key="lm_head", kind="matrix", role="lm_head", shape=(vocab, hidden),
                       sources=("lm_head.weight", "output.weight"), optional=from_gguf)
        )  # fmt: skip
    return specs


def sources(layer: int, hf: str, gguf: str) -> tuple[str, str]:
    """A layer's tensor name in safetensors and in GGUF."""
    return f"model.layers.{layer}.{hf}", f"blk.{layer}.{gguf}"


def norm_spec(layer: int, key: str, width: int, hf: str, gguf: str) -> WeightSpec:
    return WeightSpec(
        key=f"layers.{layer}.{key}",
        kind="vector",
        role="norm",
        shape=(width,),
        sources=sources(layer, f"{hf}.weight", f"{gguf}.weight"),
        layer=layer,
    )


def _attention_specs(
    config: DecoderConfig, layer: int, from_gguf: bool, interleaved: bool
) -> list[WeightSpec]:
    specs = []
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden = config.hidden_size
    for name, gguf, n, k, rotated_heads, bias in (
        ("q_proj", "attn_q", q_width, hidden, config.num_heads, config.qkv_bias),
        ("k_proj", "attn_k", kv_width, hidden, config.num_kv_heads, config.qkv_bias),
        ("v_proj", "attn_v", kv_width, hidden, 0, config.qkv_bias),
        ("o_proj", "attn_output", hidden, q_width, 0, config.output_bias),
    ):
        weight = WeightSpec(
            key=f"layers.{layer}.attention.{name}",
            kind="matrix",
            role="attention",
            shape=(n, k),
            sources=sources(layer, f"self_attn.{name}.weight", f"{gguf}.weight"),
            unpermute_heads=rotated_heads if interleaved else 0,
            layer=layer,
        )
        specs.append(weight)
        if bias:
            specs.append(
                replace(
                    weight,
                    key=f"{weight.key}.bias",
                    kind="vector",
                    shape=(n,),
                    sources=sources(layer, f"self_attn.{name}.bias", f"{gguf}.bias"),
                    optional=from_gguf,
                )
            )
    if config.attention_sinks:
        specs.append(
            WeightSpec(
                key=f"layers.{layer}.attention.sinks",
                kind="vector",
                role="attention",
                shape=(config.num_heads,),
                sources=sources(layer, "self_attn.sinks", "attn_sinks.weight"),
                layer=layer,
            )
        )
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            specs.append(
                norm_spec(layer, f"attention.{name}", config.head_dim, f"self_attn.{name}",
                          f"attn_{name}")
            )  # fmt: skip
    return specs


def mlp_spec(
    layer: int,
    key: str,
    role: Literal["dense", "shared"],
    shape: tuple[int, int],
    hf: str,
    gguf_suffix: str = "",
) -> WeightSpec:
    """A feed-forward block every token passes, as a bank of one expert.

    shape: (intermediate_size, hidden_size). hf: its name below the layer, for example ``mlp``.
    """

    def names(hf_part: str, gguf_part: str) -> tuple[str, ...]:
        return sources(layer, f"{hf}.{hf_part}.weight", f"{gguf_part}{gguf_suffix}.weight")

    return WeightSpec(
        key=f"layers.{layer}.{key}",
        kind="experts",
        role=role,
        shape=(1, *shape),
        expert_sources=ExpertSources(
            gate=names("gate_proj", "ffn_gate"),
            up=names("up_proj", "ffn_up"),
            down=names("down_proj", "ffn_down"),
        ),
        layer=layer,
    )


def router_spec(layer: int, shape: tuple[int, int], *hf: str) -> WeightSpec:
    """The router's matrix [experts, hidden_size]; ``hf``: its names below the layer."""
    return WeightSpec(
        key=f"layers.{layer}.router",
        kind="matrix",
        role="router",
        shape=shape,
        sources=(
            *(f"model.layers.{layer}.{name}.weight" for name in hf),
            f"blk.{layer}.ffn_gate_inp.weight",
        ),
        layer=layer,
    )


def bias_specs(
    layer: int, shape: tuple[int, int, int], container: Container, hf: str
) -> list[WeightSpec]:
    """The biases of a layer's routed experts; ``Loaded.bank`` finds them by their keys.

    shape: (experts, intermediate_size, hidden_size). In safetensors those of gate and up alternate
    in one tensor, ``{hf}.gate_up_proj_bias``; in GGUF each has its own.
    """
    experts, intermediate, hidden = shape
    names = {
        "gate_up_bias": (2 * intermediate, f"model.layers.{layer}.{hf}.gate_up_proj_bias"),
        "down_bias": (hidden, f"model.layers.{layer}.{hf}.down_proj_bias"),
    }
    if container == "gguf":
        names = {
            "gate_bias": (intermediate, f"blk.{layer}.ffn_gate_exps.bias"),
            "up_bias": (intermediate, f"blk.{layer}.ffn_up_exps.bias"),
            "down_bias": (hidden, f"blk.{layer}.ffn_down_exps.bias"),
        }
    return [
        WeightSpec(
            key=f"layers.{layer}.experts.{name}",
            kind="vector",
            role="experts",
            shape=(experts, width),
            sources=(source,),
            layer=layer,
        )
        for name, (width, source) in names.items()
    ]


def routed_experts_spec(
    layer: int, shape: tuple[int, int, int], *, hf: str, gate: str, up: str, down: str
) -> WeightSpec:
    """The routed experts of a layer, one tensor each or stacked.

    shape: (experts, intermediate_size, hidden_size). hf: the name of the experts below the
    layer; gate, up, down: the names below one expert. transformers' own stacks are always below
    ``mlp.experts``; older GGUF files hold one tensor per expert.
    """
    at = f"model.layers.{layer}"

    def names(part: str, gguf: str) -> tuple[str, ...]:
        one = f"{at}.{hf}.{{e}}.{part}.weight"
        return one, f"blk.{layer}.{gguf}_exps.weight", f"blk.{layer}.{gguf}.{{e}}.weight"

    return WeightSpec(
        key=f"layers.{layer}.experts",
        kind="experts",
        role="experts",
        shape=shape,
        expert_sources=ExpertSources(
            gate=names(gate, "ffn_gate"),
            up=names(up, "ffn_up"),
            down=(*names(down, "ffn_down"), f"{at}.mlp.experts.down_proj"),
            gate_up=(f"{at}.mlp.experts.gate_up_proj",),
        ),
        layer=layer,
    )

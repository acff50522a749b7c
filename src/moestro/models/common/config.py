"""The configuration that decoder-only families share, from config.json and from GGUF metadata."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moestro.models.common.reading import Reader, gguf_reader, hf_reader
from moestro.models.common.rope import context_length, rope_from_gguf, rope_from_hf
from moestro.models.spec import ModelSpec
from moestro.nn.kv_cache import CacheShape, KvShape
from moestro.nn.rope import RopeConfig

_MOST_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """windows: sliding window of each layer, 0 for full attention.

    qkv_bias, output_bias: whether the projections may have one; a GGUF file does not say, so
    there they are looked for.
    """

    model_type: ClassVar[str]
    qk_norm: ClassVar[bool] = False
    attention_sinks: ClassVar[bool] = False

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_length: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    windows: tuple[int, ...]
    eos_token_ids: tuple[int, ...]

    @property
    def layer_cache(self) -> CacheShape:
        """What a layer caches."""
        return KvShape(kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    def spec(self) -> ModelSpec:
        return ModelSpec(
            model_type=self.model_type,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
            caches=(self.layer_cache,) * self.num_layers,
            context_length=self.context_length,
            eos_token_ids=self.eos_token_ids,
        )


def fields_from_hf(
    raw: Mapping[str, Any], model_type: str, *, default_theta: float = 10000.0, default_eps: float
) -> dict[str, Any]:
    """Values of DecoderConfig's fields, with full attention and no bias: families change that."""
    config = hf_reader(raw, model_type)
    if config.get("hidden_act") not in (None, "silu", "swish"):
        raise config.unsupported("hidden_act", config.get("hidden_act"), "silu is")
    layers, trained = (
        _layers(config, "num_hidden_layers"),
        config.integer("max_position_embeddings"),
    )
    shape = _head_shape(config, "hidden_size", "num_attention_heads", "num_key_value_heads",
                        "head_dim")  # fmt: skip
    rope = rope_from_hf(config, head_dim=shape["head_dim"], default_theta=default_theta)
    return {
        **shape,
        "vocab_size": config.integer("vocab_size"),
        "num_layers": layers,
        "rms_norm_eps": config.number("rms_norm_eps", default=default_eps),
        "context_length": context_length(trained, rope),
        "rope": rope,
        "tie_word_embeddings": config.flag("tie_word_embeddings", default=False),
        "qkv_bias": False,
        "output_bias": False,
        "windows": (0,) * layers,
        "eos_token_ids": config.integers("eos_token_id"),
    }


def windows_from_hf(config: Reader, num_layers: int, window: int) -> tuple[int, ...] | None:
    """Each layer's window by ``layer_types``; None if the configuration does not list them."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    known = {"sliding_attention": window, "full_attention": 0}
    if len(kinds) != num_layers or not set(kinds) <= known.keys():
        raise config.wrong("layer_types", kinds, f"{num_layers} of {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)


# Options of GGUF metadata that change the computation, with the values that do not.
_GGUF_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),  # none given, softmax
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
}


def fields_from_gguf(
    metadata: Mapping[str, Any], architecture: str, *, reads: Collection[str] = ()
) -> dict[str, Any]:
    """Values of DecoderConfig's fields. Tied embeddings and biases show only in the tensors.

    reads: options that other families do not have and that the caller reads itself.
    """
    config = gguf_reader(metadata, architecture)
    for name, harmless in _GGUF_REFUSED.items():
        if name not in reads:
            config.refuse(name, *harmless)
    layers, trained = _layers(config, "block_count"), config.integer("context_length")
    shape = _head_shape(config, "embedding_length", "attention.head_count",
                        "attention.head_count_kv", "attention.key_length")  # fmt: skip
    config.refuse("attention.value_length", shape["head_dim"])
    rope = rope_from_gguf(config, head_dim=shape["head_dim"])
    tokens = metadata.get("tokenizer.ggml.tokens")
    tokenizer = Reader(metadata, source=config.source, prefix="tokenizer.ggml.")
    eos = (*tokenizer.integers("eos_token_id"), *tokenizer.integers("eot_token_id"))
    return {
        **shape,
        "vocab_size": config.integer("vocab_size", default=None if tokens is None else len(tokens)),
        "num_layers": layers,
        "rms_norm_eps": config.number("attention.layer_norm_rms_epsilon"),
        "context_length": context_length(trained, rope),
        "rope": rope,
        "tie_word_embeddings": False,
        "qkv_bias": True,
        "output_bias": True,
        "windows": (config.integer("attention.sliding_window", default=0, minimum=0),) * layers,
        "eos_token_ids": tuple(dict.fromkeys(eos)),
    }


def _layers(config: Reader, name: str) -> int:
    """The layer count, before anything is made once per layer."""
    layers = config.integer(name)
    if layers > _MOST_LAYERS:
        raise config.wrong(name, layers, f"at most {_MOST_LAYERS}")
    return layers


def _head_shape(
    config: Reader, hidden: str, heads: str, kv_heads: str, head: str
) -> dict[str, int]:
    hidden_size, num_heads = config.integer(hidden), config.integer(heads)
    num_kv_heads = config.integer(kv_heads, default=num_heads)
    if num_heads % num_kv_heads:
        raise config.wrong(kv_heads, num_kv_heads, f"a divisor of {heads}, {num_heads}")
    if config.get(head) is None and hidden_size % num_heads:
        raise config.wrong(hidden, hidden_size, f"a multiple of {heads}, {num_heads}")
    head_dim = config.integer(head, default=hidden_size // num_heads)
    if head_dim % 2:
        raise config.unsupported(head, head_dim, "even head sizes are")
    return {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }

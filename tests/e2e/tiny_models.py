"""Tiny random models made by transformers, written as safetensors and as GGUF, for parity tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moestro import models

GGUF_ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gpt_oss": "gpt-oss",
    "llama": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}


def make(model_type: str, *, seed: int = 0, **options: Any) -> PreTrainedModel:
    """The family's tiny() with ``options`` changed; every weight random, biases and norms too."""
    raw = {**models.family(model_type).tiny(), **options}
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5, generator=generator)
            else:
                # Wide enough that attention and routing are far from uniform.
                weight.normal_(0, 0.5 if weight.dim() == 1 else 2 * weight.shape[-1] ** -0.5,
                               generator=generator)  # fmt: skip
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2, generator=generator)
    return model


def write_safetensors(model: PreTrainedModel, folder: Path) -> Path:
    """As ``save_pretrained`` writes it: one tensor per expert."""
    model.save_pretrained(folder)
    return folder


def write_fused(model: PreTrainedModel, folder: Path) -> Path:
    """With the stacked expert tensors that transformers holds in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.contiguous() for k, v in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file(state, folder / "model.safetensors")
    model.config.save_pretrained(folder)
    return folder


def change_config(folder: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Rewrite config.json, for spellings that transformers no longer writes."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    for name in remove:
        raw.pop(name, None)
    path.write_text(json.dumps({**raw, **changes}))


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    one_tensor_per_expert: bool = False,
    split_latent: bool = True,
) -> Path:
    """As llama.cpp's converter writes the model, in F32. split_latent: as it has since it takes
    the projections of latent attention apart.
    """
    config = model.config
    architecture = GGUF_ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, config, split_latent)
    tensors = _gguf_tensors(model, one_tensor_per_expert, split_latent)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


#: GGUF type -> (elements, bytes, {offset of a float16: its size in units of the scale}) of a block,
#: so that random bytes give values around zero.
QUANTIZED_BLOCKS: dict[str, tuple[int, int, dict[int, float]]] = {
    "Q4_0": (32, 18, {0: 1}),
    "Q4_1": (32, 20, {0: 1, 2: -7.5}),
    "Q5_0": (32, 22, {0: 1}),
    "Q5_1": (32, 24, {0: 1, 2: -15.5}),
    "Q8_0": (32, 34, {0: 1}),
    "IQ4_NL": (32, 18, {0: 1}),
    "MXFP4": (32, 17, {}),
    "IQ4_XS": (256, 136, {0: 1}),
    "IQ1_S": (256, 50, {0: 1}),
    "IQ2_XXS": (256, 66, {0: 1}),
    "IQ2_S": (256, 82, {0: 1}),
    "IQ3_S": (256, 110, {0: 1}),
    "TQ1_0": (256, 54, {52: 1}),
    "Q2_K": (256, 84, {80: 1, 82: 1.5}),
    "Q3_K": (256, 110, {108: 1}),
    "Q4_K": (256, 144, {0: 1, 2: 7.5}),
    "Q5_K": (256, 176, {0: 1, 2: 15.5}),
    "Q6_K": (256, 210, {208: 1}),
}


def write_quantized_gguf(model: PreTrainedModel, path: Path, source_type: str) -> Path:
    """A GGUF whose matrices (not the router's) hold random blocks of one type.

    The model's own weights become what the gguf package decodes from them.
    """
    kind = gguf.GGMLQuantizationType[source_type]
    writer = gguf.GGUFWriter(path, GGUF_ARCHITECTURES[model.config.model_type])
    _add_metadata(writer, model.config)
    rng = np.random.default_rng(0)
    for name, tensor in _gguf_tensors(model, False).items():
        if tensor.dim() == 1 or name.endswith("ffn_gate_inp.weight"):
            writer.add_tensor(name, np.ascontiguousarray(tensor.float().numpy()))
            continue
        raw = _random_blocks(source_type, tuple(tensor.shape), rng)
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(raw, kind)))
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _random_blocks(source_type: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """uint8 [..., bytes per row]: random codes, values as spread as ``make`` has them."""
    elements, nbytes, fields = QUANTIZED_BLOCKS[source_type]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, nbytes), dtype=np.uint8)
    spread = 2 * shape[-1] ** -0.5
    if not fields:  # a shared power of two per block
        raw[..., 0] = rng.integers(-1, 2, raw.shape[:-1]) + 126 + round(np.log2(spread / 6))
        return raw.reshape(*shape[:-1], -1)
    scale = 1.0
    for _ in range(2):
        for at, factor in fields.items():
            sizes = scale * factor * rng.uniform(0.5, 1, raw.shape[:-1])
            raw[..., at : at + 2] = sizes.astype(np.float16)[..., None].view(np.uint8)
        flat = raw.reshape(*shape[:-1], -1)
        values = gguf.quants.dequantize(flat, gguf.GGMLQuantizationType[source_type])
        scale = spread / float(values.std())
    return flat


def _add_metadata(writer: gguf.GGUFWriter, config: Any, split_latent: bool = True) -> None:
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_rope_dimension_count(head_dim)
    if hasattr(config, "kv_lora_rank"):
        _add_latent_metadata(writer, config, split_latent)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_eos_token_id(2)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", 0)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_sliding_window(config.sliding_window)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_latent_metadata(writer: gguf.GGUFWriter, config: Any, split: bool) -> None:
    formed = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    if split:
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(formed[0])
        writer.add_value_length_mla(formed[1])
    else:
        writer.add_head_count_kv(config.num_attention_heads)
        writer.add_key_length(formed[0])
        writer.add_value_length(formed[1])
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    is_third = config.model_type == "deepseek_v3"
    if is_third:
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    elif split:  # older files do not say
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    if is_third or config.topk_method == "group_limited_greedy":
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if config.rope_parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


_GGUF_LAYER_NAMES = {
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.kv_b_proj.weight": "attn_kv_b.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
} | {
    f"self_attn.{hf}_proj.{part}": f"attn_{gg}.{part}"
    for hf, gg in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))
    for part in ("weight", "bias")
}
_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def _gguf_tensors(
    model: PreTrainedModel, one_tensor_per_expert: bool, split_latent: bool = True
) -> dict[str, Tensor]:
    config = model.config
    named: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name in _GGUF_NAMES:
            if name != "lm_head.weight" or not config.tie_word_embeddings:
                named[_GGUF_NAMES[name]] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        if config.model_type == "gpt_oss" and (own := _gpt_oss_tensors(rest, tensor)):
            named |= {f"blk.{layer}.{short}": value for short, value in own.items()}
            continue
        if rest == "self_attn.kv_b_proj.weight" and split_latent:
            formed = tensor.unflatten(0, (config.num_attention_heads, -1))
            keys = formed[:, : config.qk_nope_head_dim]
            named[f"blk.{layer}.attn_k_b.weight"] = keys.mT
            named[f"blk.{layer}.attn_v_b.weight"] = formed[:, config.qk_nope_head_dim :]
            continue
        if rest == "mlp.experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            named[f"blk.{layer}.ffn_gate_exps.weight"] = gate
            named[f"blk.{layer}.ffn_up_exps.weight"] = up
            continue
        if GGUF_ARCHITECTURES[config.model_type] == "llama":
            tensor = _interleave_rope_rows(config, rest, tensor)
        if rest == "mlp.shared_expert_gate.weight":
            tensor = tensor[0]  # the converter squeezes it
        named[f"blk.{layer}.{_GGUF_LAYER_NAMES[rest]}"] = tensor
    if config.rope_parameters["rope_type"] == "llama3":
        named["rope_freqs.weight"] = _rope_divisors(config)
    return _unstack(named) if one_tensor_per_expert else named


def _gpt_oss_tensors(rest: str, tensor: Tensor) -> dict[str, Tensor]:
    """What the converter turns around: gate and up taken apart, rows before columns."""
    if rest == "mlp.experts.gate_up_proj":
        gate, up = tensor[..., ::2].mT, tensor[..., 1::2].mT
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    if rest == "mlp.experts.gate_up_proj_bias":
        return {"ffn_gate_exps.bias": tensor[:, ::2], "ffn_up_exps.bias": tensor[:, 1::2]}
    if rest == "mlp.experts.down_proj":
        return {"ffn_down_exps.weight": tensor.mT}
    if rest == "mlp.experts.down_proj_bias":
        return {"ffn_down_exps.bias": tensor}
    if rest == "post_attention_layernorm.weight":
        return {"post_attention_norm.weight": tensor}
    return {}


def _interleave_rope_rows(config: Any, rest: str, tensor: Tensor) -> Tensor:
    """q and k rows of each head from half order to pair order, weights and biases."""
    heads = {
        "self_attn.q_proj": config.num_attention_heads,
        "self_attn.k_proj": config.num_key_value_heads,
    }.get(rest.rpartition(".")[0])
    if heads is None:
        return tensor
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)


def _rope_divisors(config: Any) -> Tensor:
    """What the converter stores instead of the parameters: plain frequency / scaled frequency."""
    rope: Mapping[str, float] = config.rope_parameters
    dim = config.head_dim
    divisors = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / dim)
        original = rope["original_max_position_embeddings"]
        if wavelength < original / rope["high_freq_factor"]:
            divisors.append(1.0)
        elif wavelength > original / rope["low_freq_factor"]:
            divisors.append(rope["factor"])
        else:
            smooth = (original / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(divisors)


def _unstack(named: dict[str, Tensor]) -> dict[str, Tensor]:
    apart: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if "_exps." in name:
            for e, expert in enumerate(tensor):
                apart[name.replace("_exps.weight", f".{e}.weight")] = expert
        else:
            apart[name] = tensor
    return apart

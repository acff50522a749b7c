"""The tiny models that parity tests compare with transformers: families, options, containers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_models
import torch
from torch import Tensor
from transformers import PreTrainedModel

from moestro import models
from moestro.checkpoints import open_checkpoint
from moestro.memory.convert import convert
from moestro.memory.policy import FormatPolicy


@dataclass(frozen=True)
class Case:
    """A family with changed options. ``write`` puts the model on disk below a folder."""

    name: str
    model_type: str
    options: tuple[tuple[str, Any], ...] = ()
    write: Callable[[PreTrainedModel, Path], Path] = tiny_models.write_safetensors

    def __str__(self) -> str:
        return self.name


def case(name: str, model_type: str, write: Any = tiny_models.write_safetensors, **options: Any):
    return Case(name, model_type, tuple(options.items()), write)


def gguf_file(model: PreTrainedModel, folder: Path) -> Path:
    folder.mkdir()
    return tiny_models.write_gguf(model, folder / "model.gguf")


def old_gguf_file(model: PreTrainedModel, folder: Path) -> Path:
    folder.mkdir()
    return tiny_models.write_gguf(model, folder / "model.gguf", one_tensor_per_expert=True)


def unsplit_gguf_file(model: PreTrainedModel, folder: Path) -> Path:
    folder.mkdir()
    return tiny_models.write_gguf(model, folder / "model.gguf", split_latent=False)


def renamed(model_type: str):
    """The same checkpoint under the name of a family that shares the architecture."""

    def write(model: PreTrainedModel, folder: Path) -> Path:
        path = tiny_models.write_safetensors(model, folder)
        tiny_models.change_config(path, model_type=model_type)
        return path

    return write


def packed(source: Callable[[PreTrainedModel, Path], Path]):
    """The written checkpoint converted to a packed directory, values kept."""

    def write(model: PreTrainedModel, folder: Path) -> Path:
        checkpoint = open_checkpoint(str(source(model, folder)))
        try:
            specs = models.describe(checkpoint).weights
            convert(checkpoint, specs, folder.with_name("packed"), policy=FormatPolicy.parse(""))
        finally:
            checkpoint.close()
        return folder.with_name("packed")

    return write


def changed(change: Callable[[str, Tensor], Tensor], source: Any = tiny_models.write_safetensors):
    """The model with ``change(name, weight)`` for each of its weights."""

    def write(model: PreTrainedModel, folder: Path) -> Path:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(change(name, weight))
        return source(model, folder)

    return write


def moved_sinks(by: float):
    return changed(lambda name, weight: weight + by if name.endswith("sinks") else weight)


def wide_experts(name: str, weight: Tensor) -> Tensor:
    """So wide that gate and up meet their limits."""
    return 6 * weight if ".experts.gate_up" in name else weight


LINEAR = {"rope_type": "linear", "factor": 4.0}
BANDS = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN_MSCALE = {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 16, "truncate": False}
YARN_SAME = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}

#: fed in every way
MAIN = [
    case("llama", "llama"),
    case("mixtral", "mixtral"),
    case("qwen2_moe", "qwen2_moe"),
    case("qwen3_moe", "qwen3_moe"),
    case("mixtral-window", "mixtral", sliding_window=20),
    case("gpt_oss", "gpt_oss"),
    case("deepseek_v2", "deepseek_v2"),
    case("deepseek_v3", "deepseek_v3"),
]
#: fed one-shot and in chunks
VARIANTS = [
    case("llama-tied", "llama", tie_word_embeddings=True),
    case("llama-heads-not-shared", "llama", num_key_value_heads=3),
    case("llama-wide-heads", "llama", head_dim=32, num_attention_heads=4, num_key_value_heads=2),
    case("llama-bias", "llama", attention_bias=True),
    case("llama-linear", "llama", rope_parameters=LINEAR),
    case("llama-llama3", "llama", rope_parameters=BANDS),
    case("llama-yarn", "llama", rope_parameters=YARN),
    case("llama-yarn-mscale", "llama", rope_parameters=YARN_MSCALE),
    case("llama-yarn-factor", "llama", rope_parameters={**YARN, "attention_factor": 1.3}),
    case("llama-dynamic", "llama", rope_parameters=DYNAMIC),
    case("mixtral-top-1", "mixtral", num_experts_per_tok=1),
    case("mixtral-all", "mixtral", num_experts_per_tok=4),
    case("mixtral-one-expert", "mixtral", num_local_experts=1, num_experts_per_tok=1),
    case("mixtral-tied", "mixtral", tie_word_embeddings=True),
    case("mixtral-fused", "mixtral", tiny_models.write_fused),
    case("qwen2-moe-normalized", "qwen2_moe", norm_topk_prob=True),
    case("qwen2-moe-every-second", "qwen2_moe", decoder_sparse_step=2),
    case("qwen2-moe-first-dense", "qwen2_moe", mlp_only_layers=[0]),
    case("qwen2-moe-no-bias", "qwen2_moe", qkv_bias=False),
    case("qwen2-moe-all", "qwen2_moe", num_experts_per_tok=5),
    case("qwen2-moe-top-1", "qwen2_moe", num_experts_per_tok=1),
    case("qwen2-moe-fused", "qwen2_moe", tiny_models.write_fused),
    case(
        "qwen2-moe-window", "qwen2_moe", use_sliding_window=True, sliding_window=9,
        max_window_layers=2,
    ),
    case("qwen3-moe-not-normalized", "qwen3_moe", norm_topk_prob=False),
    case("qwen3-moe-last-dense", "qwen3_moe", mlp_only_layers=[1]),
    case("qwen3-moe-bias", "qwen3_moe", attention_bias=True),
    case("qwen3-moe-window", "qwen3_moe", use_sliding_window=True, sliding_window=17),
    case("qwen3-moe-tied", "qwen3_moe", tie_word_embeddings=True),
    case("qwen3-moe-fused", "qwen3_moe", tiny_models.write_fused),
    case("qwen3-moe-yarn", "qwen3_moe", rope_parameters=YARN),
    case("gpt-oss-clamped", "gpt_oss", changed(wide_experts)),
    case("gpt-oss-sinks-rule", "gpt_oss", moved_sinks(30.0)),
    case("gpt-oss-sinks-vanish", "gpt_oss", moved_sinks(-200.0)),
    case("gpt-oss-window-1", "gpt_oss", sliding_window=1),
    case("gpt-oss-window-16", "gpt_oss", sliding_window=16),
    case("gpt-oss-all-full", "gpt_oss", layer_types=["full_attention"] * 2),
    case("gpt-oss-full-first", "gpt_oss", layer_types=["full_attention", "sliding_attention"]),
    case("gpt-oss-three-layers", "gpt_oss", num_hidden_layers=3),
    case("gpt-oss-no-attention-bias", "gpt_oss", attention_bias=False),
    case("gpt-oss-top-1", "gpt_oss", num_experts_per_tok=1),
    case("gpt-oss-all", "gpt_oss", num_experts_per_tok=5),
    case("gpt-oss-one-expert", "gpt_oss", num_local_experts=1, num_experts_per_tok=1),
    case("gpt-oss-heads-not-shared", "gpt_oss", num_key_value_heads=4),
    case("gpt-oss-tied", "gpt_oss", tie_word_embeddings=True),
    case("gpt-oss-plain-rope", "gpt_oss", rope_parameters={"rope_type": "default",
                                                           "rope_theta": 1e4}),
    case("gpt-oss-yarn-truncated", "gpt_oss", rope_parameters={**YARN, "rope_theta": 150000.0}),
    case("gpt-oss-default-rope", "gpt_oss", rope_parameters=None, max_position_embeddings=4096),
    case("gpt-oss-packed", "gpt_oss", packed(tiny_models.write_safetensors)),
    case("gpt-oss-gguf", "gpt_oss", gguf_file),
    case("gpt-oss-gguf-packed", "gpt_oss", packed(gguf_file)),
    case("deepseek-v2-greedy", "deepseek_v2", topk_method="greedy"),
    case("deepseek-v2-no-query-lora", "deepseek_v2", q_lora_rank=None),
    case("deepseek-v2-yarn", "deepseek_v2", rope_parameters=YARN_SAME),
    case("deepseek-v2-yarn-mscale", "deepseek_v2", rope_parameters=YARN_MSCALE),
    case("deepseek-v2-one-shared", "deepseek_v2", n_shared_experts=1),
    case("deepseek-v2-all-dense", "deepseek_v2", first_k_dense_replace=3),
    case("deepseek-v2-none-dense", "deepseek_v2", first_k_dense_replace=0),
    case("deepseek-v2-bias", "deepseek_v2", attention_bias=True),
    case("deepseek-v2-tied", "deepseek_v2", tie_word_embeddings=True),
    case("deepseek-v2-fused", "deepseek_v2", tiny_models.write_fused),
    case("deepseek-v2-packed", "deepseek_v2", packed(tiny_models.write_safetensors)),
    case("deepseek-v3-one-group", "deepseek_v3", n_group=1, topk_group=1),
    case("deepseek-v3-not-normalized", "deepseek_v3", norm_topk_prob=False),
    case("deepseek-v3-no-query-lora", "deepseek_v3", q_lora_rank=None),
    case("deepseek-v3-plain-rope", "deepseek_v3", rope_parameters={"rope_type": "default",
                                                                   "rope_theta": 1e4}),
    case("deepseek-v3-yarn-mscale", "deepseek_v3", rope_parameters=YARN_MSCALE),
    case("deepseek-v3-yarn-unscaled", "deepseek_v3", rope_parameters=YARN),
    case("deepseek-v3-halves", "deepseek_v3", rope_interleave=False),
    case("deepseek-v3-two-shared", "deepseek_v3", n_shared_experts=2),
    case("deepseek-v3-two-dense", "deepseek_v3", first_k_dense_replace=2),
    case("deepseek-v3-bias", "deepseek_v3", attention_bias=True),
    case("deepseek-v3-many-heads", "deepseek_v3", num_attention_heads=18, num_key_value_heads=18),
    case("deepseek-v3-packed", "deepseek_v3", packed(tiny_models.write_fused)),
    case("kimi-k2", "deepseek_v3", renamed("kimi_k2"), n_group=1, topk_group=1),
    case("deepseek-v2-gguf", "deepseek_v2", gguf_file),
    case("deepseek-v2-gguf-lite", "deepseek_v2", gguf_file, q_lora_rank=None, topk_method="greedy",
         rope_parameters=YARN_SAME),
    case("deepseek-v2-gguf-unsplit", "deepseek_v2", unsplit_gguf_file),
    case("deepseek-v3-gguf", "deepseek_v3", gguf_file),
    case("deepseek-v3-gguf-unscaled", "deepseek_v3", gguf_file, rope_parameters=YARN),
    case("deepseek-v3-gguf-unsplit", "deepseek_v3", unsplit_gguf_file, n_shared_experts=2),
    case("deepseek-v3-gguf-packed", "deepseek_v3", packed(gguf_file)),
    case("llama-gguf", "llama", gguf_file),
    case("llama-gguf-tied", "llama", gguf_file, tie_word_embeddings=True),
    case("llama-gguf-bias", "llama", gguf_file, attention_bias=True),
    case("llama-gguf-llama3", "llama", gguf_file, rope_parameters=BANDS),
    case("llama-gguf-linear", "llama", gguf_file, rope_parameters=LINEAR),
    case("llama-gguf-yarn", "llama", gguf_file, rope_parameters=YARN),
    case("mixtral-gguf", "mixtral", gguf_file),
    case("mixtral-gguf-old", "mixtral", old_gguf_file),
    case("qwen2-moe-gguf", "qwen2_moe", gguf_file),
    case("qwen3-moe-gguf", "qwen3_moe", gguf_file),
    case("llama-gguf-packed", "llama", packed(gguf_file), rope_parameters=BANDS),
    case("mixtral-packed", "mixtral", packed(tiny_models.write_safetensors)),
    case("qwen2-moe-packed", "qwen2_moe", packed(tiny_models.write_safetensors)),
    case("qwen2-moe-gguf-packed", "qwen2_moe", packed(gguf_file)),
    case("qwen3-moe-packed", "qwen3_moe", packed(tiny_models.write_fused), mlp_only_layers=[0]),
]  # fmt: skip

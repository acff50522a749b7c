"""Checkpoints without data in the shapes of published models, for planning and for tests.

    python benchmarks/published_shapes.py OUT_DIR --models qwen3-30b-a3b,deepseek-v3
    moestro plan OUT_DIR/qwen3-30b-a3b --machine docs/examples/machine-laptop.yaml

Each is a directory with the published config.json (what of it matters) and one model.safetensors of
the real size whose header is complete and whose data is a hole: it takes a few megabytes of disk.
Tensors are stored as published: bfloat16, FP8 with block scales, or MXFP4 blocks.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moestro import models
from moestro.memory.weights import WeightSpec

Config = dict[str, Any]
#: (name, safetensors type, shape)
Tensor = tuple[str, str, tuple[int, ...]]

_BITS = {"BF16": 16, "F32": 32, "F8_E4M3": 8, "U8": 8}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
        "activation_scheme": "dynamic"}  # fmt: skip


def _qwen3_moe(**changes: Any) -> Config:
    return {
        "model_type": "qwen3_moe", "vocab_size": 151936, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    } | changes  # fmt: skip


def _latent(**changes: Any) -> Config:
    return {
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
        "moe_layer_freq": 1, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "quantization_config": _FP8,
    } | changes  # fmt: skip


def _yarn(factor: float) -> Config:
    return {"type": "yarn", "factor": factor, "original_max_position_embeddings": 4096,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip


#: from the config.json that each model is published with
CONFIGS: dict[str, Config] = {
    "qwen3-30b-a3b": _qwen3_moe(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32,
    ),
    "qwen3-235b-a22b": _qwen3_moe(
        hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536,
        num_hidden_layers=94, num_attention_heads=64,
    ),
    "deepseek-v3": _latent(
        model_type="deepseek_v3", vocab_size=129280, num_attention_heads=128,
        num_key_value_heads=128, n_routed_experts=256, first_k_dense_replace=3, n_group=8,
        topk_group=4, routed_scaling_factor=2.5, max_position_embeddings=163840,
        rope_theta=10000, rope_scaling=_yarn(40),
    ),
    "kimi-k2": _latent(
        model_type="kimi_k2", vocab_size=163840, num_attention_heads=64, num_key_value_heads=64,
        n_routed_experts=384, first_k_dense_replace=1, n_group=1, topk_group=1,
        routed_scaling_factor=2.827, max_position_embeddings=131072, rope_theta=50000.0,
        rope_scaling=_yarn(32),
    ),
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
        "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 150000, "attention_bias": True,
        "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                         "truncate": False, "original_max_position_embeddings": 4096},
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                "lm_head",
            ],
        },
    },
    # Not a family that is implemented: its plan is a refusal that names those that are.
    "glm-4.5-air": {
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 1, "max_position_embeddings": 131072,
    },
}  # fmt: skip


def tensors(config: Config) -> Iterator[Tensor]:
    """Every tensor of a model, by the names that its family reads from safetensors."""
    if config["model_type"] not in models.families():
        yield "model.embed_tokens.weight", "BF16", (config["vocab_size"], config["hidden_size"])
        return
    family = models.family(config["model_type"])
    method = config.get("quantization_config", {}).get("quant_method", "")
    seen: set[str] = set()
    for spec in family.weights(family.Config.from_hf(config), "safetensors"):
        for tensor in _of_weight(spec, method):
            if tensor[0] not in seen:
                seen.add(tensor[0])
                yield tensor


def _of_weight(spec: WeightSpec, method: str) -> Iterator[Tensor]:
    if spec.kind == "vector":
        yield spec.sources[0], "BF16", spec.shape
    elif spec.kind == "matrix":
        if spec.head_rows is not None:
            name, shape = spec.head_rows.sources[0], spec.head_rows.stored_shape(spec.shape)
        else:
            name, shape = spec.sources[0], (spec.shape[0], spec.shape[1])
        quantized = method == "fp8" and spec.role == "attention"
        yield from _matrix(name, shape, fp8=quantized)
    else:
        yield from _of_experts(spec, method)


def _of_experts(spec: WeightSpec, method: str) -> Iterator[Tensor]:
    count, intermediate, hidden = spec.shape
    names = spec.expert_sources
    if names is None:
        raise ValueError(f"{spec.key} has no sources")
    if method == "mxfp4":  # 16 bytes of codes and one exponent for 32 inputs
        for name, rows, cols in (
            (names.gate_up[0], 2 * intermediate, hidden),
            (names.down[0], hidden, intermediate),
        ):
            yield f"{name}_blocks", "U8", (count, rows, cols // 32, 16)
            yield f"{name}_scales", "U8", (count, rows, cols // 32)
        return
    parts = [(names.gate, (intermediate, hidden)), (names.up, (intermediate, hidden)),
             (names.down, (hidden, intermediate))]  # fmt: skip
    for expert in range(count):
        for candidates, shape in parts:
            yield from _matrix(candidates[0].format(e=expert), shape, fp8=method == "fp8")


def _matrix(name: str, shape: tuple[int, int], *, fp8: bool) -> Iterator[Tensor]:
    yield name, "F8_E4M3" if fp8 else "BF16", shape
    if fp8:
        yield f"{name}_scale_inv", "F32", (-(-shape[0] // 128), -(-shape[1] // 128))


def write(folder: Path, config: Config) -> Path:
    """The directory of a model, its data a hole. Returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in tensors(config):
        nbytes = math.prod(shape) * _BITS[dtype] // 8
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [end, end + nbytes],
        }
        end += nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default=",".join(CONFIGS), help="comma-separated")
    options = parser.parse_args()
    for name in options.models.split(","):
        print(write(options.out / name, CONFIGS[name]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

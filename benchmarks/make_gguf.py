"""Synthetic GGUF files in the shape of Qwen3-30B-A3B with few layers, for speed comparisons.

    python benchmarks/make_gguf.py OUT_DIR --layers 4 --types BF16,Q8_0,Q4_K_M,Q4_0

Weights are random (normal, scale 0.02) and so is what such a model says, but every matrix has its
real shape and every expert is used, so its speed per layer is that of the real model. BF16 is
written here; the other types are made of it by llama.cpp's own quantizer, which
``python benchmarks/setup_peers.py llama.cpp`` builds. Files that are there already are kept.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from peers import cache as peers_cache
from peers.llama_cpp import LlamaCpp
from peers.worker import PeerFailed

SCALE = 0.02
#: normal numbers drawn once; matrices are slices of them at random places
_POOL = 1 << 24
_BYTE_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    context_length: int = 32768


SHAPES = {
    "qwen3-30b-a3b": ModelShape(
        hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=8192,
    ),
    "tiny": ModelShape(
        hidden_size=256, moe_intermediate_size=256, num_experts=8, num_experts_per_tok=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=300,
    ),
}  # fmt: skip

Tensors = list[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]]


def tensors(shape: ModelShape, layers: int) -> Tensors:
    """Names, shapes and types in the order of the file."""
    bf16, f32 = gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.F32
    hidden, inter, experts = shape.hidden_size, shape.moe_intermediate_size, shape.num_experts
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    found: Tensors = [
        ("token_embd.weight", (shape.vocab_size, hidden), bf16),
        ("output_norm.weight", (hidden,), f32),
        ("output.weight", (shape.vocab_size, hidden), bf16),
    ]
    for layer in range(layers):
        parts: Tensors = [
            ("attn_norm", (hidden,), f32),
            ("attn_q", (queries, hidden), bf16),
            ("attn_k", (keys, hidden), bf16),
            ("attn_v", (keys, hidden), bf16),
            ("attn_output", (hidden, queries), bf16),
            ("attn_q_norm", (shape.head_dim,), f32),
            ("attn_k_norm", (shape.head_dim,), f32),
            ("ffn_norm", (hidden,), f32),
            ("ffn_gate_inp", (experts, hidden), f32),
            ("ffn_gate_exps", (experts, inter, hidden), bf16),
            ("ffn_up_exps", (experts, inter, hidden), bf16),
            ("ffn_down_exps", (experts, hidden, inter), bf16),
        ]
        found += [(f"blk.{layer}.{name}.weight", size, kind) for name, size, kind in parts]
    return found


class Noise:
    """Normal numbers of scale 0.02, float32 or rounded to bfloat16, the same on every run."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._pool = self._rng.standard_normal(_POOL, dtype=np.float32) * np.float32(SCALE)
        bits = self._pool.view(np.uint32)
        even = (bits >> np.uint32(16)) & np.uint32(1)  # round to nearest, ties to even
        self._bf16 = ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)

    def pieces(self, count: int, kind: gguf.GGMLQuantizationType) -> Iterator[npt.NDArray]:
        """``count`` numbers as slices of the pool."""
        pool = self._bf16 if kind == gguf.GGMLQuantizationType.BF16 else self._pool
        while count:
            start = int(self._rng.integers(0, _POOL // 4))
            piece = pool[start : start + count]
            count -= len(piece)
            yield piece


def write(path: Path, shape: ModelShape, layers: int) -> None:
    """Write the file with bfloat16 matrices, under another name until it is complete."""
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, "qwen3moe")
    _describe(writer, shape, layers)
    found = tensors(shape, layers)
    for name, size, kind in found:
        width = 2 if kind == gguf.GGMLQuantizationType.BF16 else 4
        dtype = np.dtype(np.uint16 if width == 2 else np.float32)
        writer.add_tensor_info(name, size, dtype, int(np.prod(size)) * width, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    noise = Noise()
    for name, size, kind in found:
        if name.endswith("norm.weight"):
            data = np.ones(size, np.float32)
        else:
            data = np.concatenate(list(noise.pieces(int(np.prod(size)), kind))).reshape(size)
        writer.write_tensor_data(data)
    writer.close()
    os.replace(partial, path)


def _describe(writer: gguf.GGUFWriter, shape: ModelShape, layers: int) -> None:
    writer.add_name("synthetic")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(layers)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(3 * shape.hidden_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(shape.num_experts)
    writer.add_expert_used_count(shape.num_experts_per_tok)
    writer.add_expert_feed_forward_length(shape.moe_intermediate_size)
    writer.add_vocab_size(shape.vocab_size)
    _add_vocabulary(writer, shape.vocab_size)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Bytes, so that every text has tokens, then words nobody writes."""
    types = gguf.TokenType
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(_BYTE_TOKENS))]
    kinds = [types.UNKNOWN, types.CONTROL, types.CONTROL, *[types.BYTE] * _BYTE_TOKENS]
    names += [f"<word{index}>" for index in range(len(names), size)]
    kinds += [types.NORMAL] * (size - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def model_path(folder: Path, shape: str, layers: int, file_type: str) -> Path:
    """Where the file of that shape and type is, or will be."""
    return folder / f"{shape}-{layers}-layers-{file_type}.gguf"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for the files")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--types", default="BF16,Q8_0,Q4_K_M,Q4_0", help="comma-separated")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, default=peers_cache.DEFAULT, help="peers")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    base = model_path(options.out, options.shape, options.layers, "BF16")
    if not base.exists():
        write(base, SHAPES[options.shape], options.layers)
    print(base, flush=True)
    for file_type in options.types.split(","):
        path = model_path(options.out, options.shape, options.layers, file_type)
        if not path.exists():
            partial = path.with_name(path.name + ".partial")
            try:
                LlamaCpp(options.cache).quantize(base, partial, file_type, options.threads)
            except (peers_cache.MissingPeer, PeerFailed) as error:
                print(error, file=sys.stderr)
                return 1
            os.replace(partial, path)
        if path != base:
            print(path, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

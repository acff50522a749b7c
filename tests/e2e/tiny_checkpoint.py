"""A tiny random mixture with a byte tokenizer on disk, quick to make: without transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from moestro import models

BOS, EOS, TURN = 256, 257, 258
VOCAB = 260
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)


def write(
    folder: Path,
    *,
    family: str = "mixtral",
    seed: int = 0,
    template: bool = True,
    context: int = 512,
) -> Path:
    """A loadable Hugging Face directory with random float32 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = {
        **models.family(family).tiny(),
        "vocab_size": VOCAB,
        "max_position_embeddings": context,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    _write_weights(folder, family, raw, seed)
    _write_tokenizer(folder, template)
    return folder


def _write_weights(folder: Path, family: str, raw: dict[str, object], seed: int) -> None:
    module = models.family(family)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int) -> None:
        # Wide enough that the likeliest token depends on all of the text.
        scale = 2 * shape[-1] ** -0.5
        tensors[name] = torch.randn(shape, generator=generator) * scale

    for spec in module.weights(module.Config.from_hf(raw), "safetensors"):
        if spec.expert_sources is not None:
            count, intermediate, hidden = spec.shape
            for e in range(count):
                for name in (spec.expert_sources.gate[0], spec.expert_sources.up[0]):
                    add(name.format(e=e), intermediate, hidden)
                add(spec.expert_sources.down[0].format(e=e), hidden, intermediate)
        elif spec.kind == "vector":
            tensors[spec.sources[0]] = torch.rand(spec.shape, generator=generator) + 0.5
        else:
            add(spec.sources[0], *spec.shape)
    save_file(tensors, folder / "model.safetensors")


def _write_tokenizer(folder: Path, template: bool) -> None:
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<bos>", "<eos>", "<turn>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>"}
    if template:
        settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

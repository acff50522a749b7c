"""transformers: a model of the same shape with random bfloat16 weights, in a process of its own.

    transformers_model.py THREADS SHAPE      SHAPE: the fields of Qwen3MoeConfig, as JSON

Each line on standard input is answered by a line of JSON:

    prefill TOKENS            -> seconds of the whole prompt
    decode CONTEXT TOKENS     -> seconds of all tokens
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

NAME = "transformers"
IMPLEMENTATION = "grouped_mm"


def build(fields: dict[str, Any]) -> Any:
    """A Qwen3-MoE model with random weights, as transformers runs experts fastest on CPUs."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: PLC0415 - in the child

    config = Qwen3MoeConfig(**fields)
    config._experts_implementation = IMPLEMENTATION
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    torch.set_default_dtype(default)
    model = model.to_empty(device="cpu").eval()
    noise = (torch.randn(1 << 24) * 0.02).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), noise.numel()):
                piece = flat[start : start + noise.numel()]
                piece.copy_(noise[: piece.numel()] if parameter.dim() > 1 else 1)
        rotary = model.model.rotary_emb
        model.model.rotary_emb = type(rotary)(config)  # its buffers were on meta
    return model


class Session:
    def __init__(self, model: Any) -> None:
        self.model = model
        self.vocabulary = model.config.vocab_size

    def _ids(self, count: int) -> torch.Tensor:
        return torch.randint(self.vocabulary, (1, count))

    @torch.inference_mode()
    def prefill(self, tokens: int) -> tuple[float, Any]:
        ids = self._ids(tokens)
        start = time.perf_counter()
        result = self.model(ids, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - start, result.past_key_values

    @torch.inference_mode()
    def decode(self, context: int, tokens: int) -> float:
        cache = self.prefill(max(context, 1))[1]
        ids = self._ids(1)
        start = time.perf_counter()
        for _ in range(tokens):
            cache = self.model(ids, past_key_values=cache, use_cache=True).past_key_values
        return time.perf_counter() - start

    def answer(self, what: str, words: list[str]) -> dict[str, Any]:
        if what == "prefill":
            return {"seconds": self.prefill(int(words[0]))[0]}
        if what == "decode":
            return {"seconds": self.decode(int(words[0]), int(words[1]))}
        return {"error": f"unknown request: {what}"}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(int(sys.argv[1]))
    session = Session(build(json.loads(sys.argv[2])))
    import transformers  # noqa: PLC0415 - its version

    version = f"{NAME} {transformers.__version__} with torch {torch.__version__}, {IMPLEMENTATION}"
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        what, *words = line.split()
        print(json.dumps(session.answer(what, words)), file=answers, flush=True)


def command(threads: int, fields: dict[str, Any]) -> list[str]:
    """What starts this file as a worker."""
    return [sys.executable, str(Path(__file__)), str(threads), json.dumps(fields)]


if __name__ == "__main__":
    main()

"""This engine on a whole model, kept loaded, with the requests and answers of llama_model.cpp.

    python benchmarks/peers/ours_model.py MODEL THREADS CONTEXT MEMORY

``stats`` is answered by what was read from disk since the last time.
"""

from __future__ import annotations

import json
import random
import sys

import torch

from moestro import LLM, SamplingParams
from moestro.engine.request import Completion
from moestro.memory.streamed_bank import StreamStats


class Served:
    def __init__(self, model: str, threads: int, context: int, memory: str) -> None:
        self.llm = LLM(
            model, threads=threads, context=context, memory=memory, max_sequences=1,
            kv_dtype="float16",
        )  # fmt: skip
        self._random = random.Random(0)
        self._before: StreamStats | None = None
        self._vocabulary = self.llm.loaded.description.spec.vocab_size

    def prefill(self, tokens: int) -> float:
        """Seconds of a prompt that was never seen, up to its first answer token."""
        return self._complete(tokens, 1).timings.prefill

    def decode(self, context: int, tokens: int) -> float:
        """Seconds of ``tokens`` answer tokens after an unseen prompt."""
        return self._complete(max(context, 1), tokens + 1).timings.decode

    def _complete(self, tokens: int, answer: int) -> Completion:
        prompt = [self._random.randrange(self._vocabulary) for _ in range(tokens)]
        params = SamplingParams(temperature=1.0, seed=7, max_tokens=answer, ignore_eos=True)
        return self.llm.generate(prompt, params)[0]

    def stats(self) -> dict[str, float]:
        streaming = self.llm.loaded.streaming
        if streaming is None:
            raise SystemExit("the whole model is in memory: nothing is read from disk")
        now = streaming.stats()
        since = now if self._before is None else now.since(self._before)
        self._before = now
        return {
            "hit_rate": since.hit_rate, "rate": since.rate, "nbytes": since.nbytes,
            "seconds": since.seconds, "slots": now.slots, "experts": now.experts,
        }  # fmt: skip


def main() -> int:
    model, threads, context, memory = sys.argv[1:5]
    torch.set_num_threads(1)
    served = Served(model, int(threads), int(context), memory)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        what, *numbers = line.split()
        if what == "stats":
            print(json.dumps(served.stats()), flush=True)
            continue
        seconds = {"prefill": served.prefill, "decode": served.decode}[what](*map(int, numbers))
        print(json.dumps({"seconds": seconds}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

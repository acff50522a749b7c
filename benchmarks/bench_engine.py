"""A whole model on this engine: prefill and decode per layer and token, beside its own byte roof.

    python benchmarks/bench_engine.py MODEL.gguf --prefill 512 --decode 0,16384 --tokens 64

The roof of decode is the time that reading its bytes takes at the read bandwidth measured right
before and after: each weight once per token, of the experts only the chosen ones, and the keys and
values of the context. Medians over the rounds are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from limits import Probes
from moestro import LLM, SamplingParams, __version__, models, native
from moestro.checkpoints import open_checkpoint
from moestro.engine.request import MAX_LOGPROBS, Completion
from moestro.memory.policy import FormatPolicy
from moestro.memory.sources import ExpertsSource, resolve

_KV_DTYPE = torch.float16


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """What decode reads per token: weights, and keys and values per position of context."""

    weights: int
    per_position: int

    def of_token(self, context: int) -> int:
        return self.weights + context * self.per_position


def bytes_per_token(model: Path) -> Bytes:
    """From headers: every matrix but the embedding, which gives one row, and chosen experts."""
    with closing(open_checkpoint(model)) as checkpoint:
        description = models.describe(checkpoint)
        config, total = description.config, 0
        for source in resolve(checkpoint, description.weights, FormatPolicy()):
            if isinstance(source, ExpertsSource):
                parts = (source.layout.part_range(index) for index in range(3))
                total += config.top_k * sum(stop - start for start, stop in parts)
            elif source.format is not None and source.spec.role != "embedding":
                total += source.format.nbytes(source.rows, source.cols)
    spec = description.spec
    return Bytes(
        weights=total,
        per_position=sum(cache.position_nbytes(_KV_DTYPE) for cache in spec.caches),
    )


class Session:
    """A loaded model and the measurements on it; one sequence at a time."""

    def __init__(self, model: Path, *, threads: int, context: int) -> None:
        self.llm = LLM(model, context=context, max_sequences=1, threads=threads, kv_dtype="float16")
        self.bytes = bytes_per_token(model)
        self.spec = self.llm.loaded.description.spec
        self._random = random.Random(0)
        self._prompts: dict[int, list[int]] = {}

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(self.spec.vocab_size) for _ in range(count)]

    def _complete(self, prompt: list[int], answer: int) -> Completion:
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        return self.llm.generate(prompt, params)[0]

    def prefill(self, tokens: int) -> float:
        """Seconds per token of a prompt that was never seen, up to its first answer token."""
        return self._complete(self._ids(tokens), 1).timings.prefill / tokens

    def likeliest(self, prompt: list[int]) -> list[tuple[int, float]]:
        """Tokens that may follow a prompt with their log probabilities, best first."""
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=MAX_LOGPROBS)
        completion = self.llm.generate(prompt, params)[0]
        return list(completion.logprobs[0].top) if completion.logprobs else []

    def decode(self, context: int, tokens: int) -> float:
        """Seconds per token after ``context`` of them; the prompt of each context stays the same,
        so that its keys and values are computed only the first time.
        """
        prompt = self._prompts.setdefault(context, self._ids(max(context, 1)))
        return self._complete(prompt, tokens + 1).timings.decode / tokens


@dataclass(frozen=True, kw_only=True)
class Row:
    """context: of decode, where it begins. frac_of_read_bw: of its bytes at the measured rate."""

    kind: str
    tokens: int
    context: int
    us_per_layer_token: float
    tokens_s: float
    mb_per_token: float
    frac_of_read_bw: float | None


def measure_prefill(session: Session, tokens: int, rounds: int) -> Row:
    session.prefill(tokens)
    seconds = statistics.median(session.prefill(tokens) for _ in range(rounds))
    return Row(
        kind="prefill",
        tokens=tokens,
        context=0,
        us_per_layer_token=seconds / session.spec.num_layers * 1e6,
        tokens_s=1 / seconds,
        mb_per_token=0.0,
        frac_of_read_bw=None,
    )


def measure_decode(session: Session, context: int, tokens: int, probes: Probes, rounds: int) -> Row:
    nbytes = session.bytes.of_token(context + tokens // 2)
    session.decode(context, tokens)
    samples: list[tuple[float, float]] = []
    before = probes.read()
    for _ in range(rounds):
        seconds = session.decode(context, tokens)
        after = probes.read()
        samples.append((seconds, nbytes / seconds / ((before + after) / 2)))
        before = after
    seconds, of_read = (statistics.median(column) for column in zip(*samples, strict=True))
    return Row(
        kind="decode",
        tokens=tokens,
        context=context,
        us_per_layer_token=seconds / session.spec.num_layers * 1e6,
        tokens_s=1 / seconds,
        mb_per_token=nbytes / 1e6,
        frac_of_read_bw=of_read,
    )


def lengths(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prefill", type=lengths, default="512", help="prompt lengths")
    parser.add_argument("--decode", type=lengths, default="0,16384", help="contexts")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to decode")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    return parser.parse_args()


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    context = max([*options.prefill, *options.decode, 1]) + options.tokens + 2
    session = Session(options.model, threads=options.threads, context=context)
    probes = Probes()
    probes.read()
    rows = [measure_prefill(session, n, options.rounds) for n in options.prefill]
    rows += [
        measure_decode(session, n, options.tokens, probes, options.rounds) for n in options.decode
    ]
    limits = probes.summary()
    if options.json:
        report = {
            "moestro": __version__,
            "model": options.model.name,
            "format": session.llm.loaded.format_name,
            "layers": session.spec.num_layers,
            "limits": limits.as_dict(),
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps(report, indent=2))
        return 0
    loaded = session.llm.loaded
    print(f"{options.model.name}, mostly {loaded.format_name}, {native.isa()}")
    print(limits)
    for row in rows:
        where = f"at {row.context:5d}" if row.kind == "decode" else ""
        roof = "" if row.frac_of_read_bw is None else f"{row.frac_of_read_bw:6.1%} of read"
        print(
            f"{row.kind:7s} {row.tokens:4d} {where:8s} {row.us_per_layer_token:8.0f} us per layer "
            f"and token {row.tokens_s:7.1f} tok/s  {roof}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

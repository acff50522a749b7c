"""What the plan predicts beside what whole models do: prefill and decode, several formats.

    python benchmarks/bench_plan.py MODEL.gguf MODEL2.gguf --formats int4-g32,int8-g32,bf16

The machine is measured at the beginning, as ``moestro doctor --measure`` does; memory is read
beside every round, to see whether it is still as fast. Rounds in which other programs took more
than a tenth of the cores are taken again, up to three times as many in all. Medians are reported.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from moestro import LLM, SamplingParams, native
from moestro.devices.cpu.measure import measure, read_now
from moestro.engine.beside import Watch
from moestro.machine.rates import CpuRates, MachineRates
from moestro.memory.speed import SpeedModel

_PROMPT, _CONTEXT = 512, 16
_CLEAN = 0.9


@dataclass(frozen=True, kw_only=True)
class Row:
    """Tokens per second; ratio: measured over predicted. core_share: what the threads got of the
    cores. read_gb_s: of memory beside it.
    """

    model: str
    format: str
    task: str
    measured: float
    predicted: float
    ratio: float
    limit: str
    core_share: float
    read_gb_s: float

    def line(self) -> str:
        return (
            f"{self.model:12s} {self.format:10s} {self.task:8s} {self.measured:8.1f} tok/s, "
            f"predicted {self.predicted:8.1f}: {self.ratio:5.2f}  ({self.limit}; memory at "
            f"{self.read_gb_s:.0f} GB/s, {self.core_share:.0%} of the cores)"
        )


@dataclass(frozen=True, kw_only=True)
class Sample:
    speed: float
    core_share: float
    read: float


class Session:
    """A loaded model that is run on random tokens."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._draw = llm, random.Random(0)

    def run(self, task: str, tokens: int) -> Sample:
        """``prefill`` of the prompt, or ``decode`` of so many tokens after a short one."""
        prompt, answer = (_PROMPT, 1) if task == "prefill" else (_CONTEXT, tokens + 1)
        vocab = self._llm.loaded.description.spec.vocab_size
        ids = [self._draw.randrange(vocab) for _ in range(prompt)]
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        before = read_now()
        watch = Watch(self._llm.loaded.threads)
        timings = self._llm.generate(ids, params)[0].timings
        share = watch.stop().core_share
        speed = prompt / timings.prefill if task == "prefill" else tokens / timings.decode
        return Sample(speed=speed, core_share=share, read=(before + read_now()) / 2)

    def samples(self, task: str, tokens: int, rounds: int) -> list[Sample]:
        clean: list[Sample] = []
        taken: list[Sample] = []
        while len(clean) < rounds and len(taken) < 3 * rounds:
            taken.append(self.run(task, tokens))
            clean += [taken[-1]] if taken[-1].core_share > _CLEAN else []
        return clean or taken


def rows(model: Path, name: str, cpu: CpuRates, *, tokens: int, rounds: int) -> list[Row]:
    with LLM(model, formats=name or None, context=1024, max_sequences=1) as llm:
        session, plan = Session(llm), llm.plan
        machine = MachineRates(name="here", memory=0, cpu=cpu)
        predict = SpeedModel(plan.shape, machine, plan.placed())
        chunk = llm.loaded.engine.config.max_batch_tokens
        session.run("decode", 4)
        found = []
        for task in ("prefill", "decode"):
            taken = session.samples(task, tokens, rounds)
            wanted = (
                predict.prefill(tokens=_PROMPT, chunk=chunk)
                if task == "prefill"
                else predict.decode(depth=_CONTEXT + tokens // 2, sequences=1)
            )
            speed = statistics.median(sample.speed for sample in taken)
            found.append(
                Row(
                    model=model.stem,
                    format=plan.shape.format_name,
                    task=task,
                    measured=speed,
                    predicted=wanted.tokens_per_second,
                    ratio=speed / wanted.tokens_per_second,
                    limit=wanted.limit,
                    core_share=statistics.median(sample.core_share for sample in taken),
                    read_gb_s=statistics.median(sample.read for sample in taken) / 1e9,
                )
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--formats", default="", help="comma-separated; default: as stored")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to decode")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.formats.split(",")
    cpu = measure([name for name in names if name] or None)
    if not options.json:
        print(f"memory {cpu.read.median / 1e9:.0f} GB/s, {cpu.dot / 1e9:.0f} GOP/s of dots")
        for name, rate in cpu.kernels.items():
            print(f"{name:10s} {rate}")
    found: list[Row] = []
    for model in options.models:
        for name in names:
            found += rows(model, name, cpu, tokens=options.tokens, rounds=options.rounds)
            if not options.json:
                for row in found[-2:]:
                    print(row.line(), flush=True)
    if options.json:
        facts = {"isa": native.isa(), "threads": native.threads(), "cpu": asdict(cpu)}
        print(json.dumps(facts | {"rows": [asdict(row) for row in found]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Moestro against other engines, side by side in one run on one machine.

    python benchmarks/compare.py --peers llama.cpp,kt-kernel --models DIR --json

Sides take turns, with a probe of the machine's limits between them (probe, ours, probe, peer,
probe, ...), with the same threads and the same weights; medians and spread of the ratios are
reported. A whole run takes many minutes: --only, --formats, --tokens, --tasks and --rounds choose
pieces of it, and --json adds each piece to the files in --out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench_engine import Session
from bench_moe import SHAPES
from comparing import operators, whole_models
from comparing.report import Report, line
from comparing.weights import KINDS, make_case
from limits import Probes
from make_gguf import model_path
from moestro import __version__, native
from moestro.machine import facts
from peers import cache as peers_cache
from peers import transformers_model
from peers.kt import NAME as KT
from peers.kt import KtKernel
from peers.llama_cpp import NAME as LLAMA
from peers.llama_cpp import LlamaCpp
from peers.worker import PeerFailed, Worker

#: llama.cpp without rearranged weights: slower for one token, faster for many
LLAMA_PLAIN = "llama.cpp-plain"
TRANSFORMERS = transformers_model.NAME
OPERATOR_PEERS = (LLAMA, LLAMA_PLAIN, KT)
MODEL_PEERS = (LLAMA, TRANSFORMERS)
SHAPE = "qwen3-30b-a3b"
FILE_TYPES = ("Q4_K_M", "Q4_0", "Q8_0", "BF16")
TASKS = (f"prefill-{whole_models.PREFILL}", "decode-0", "decode-16384")
RESULTS = Path(__file__).resolve().parent / "results"


class Comparison:
    """One run's options, probes and caches."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.cache: Path = options.cache.resolve()
        self.probes = Probes()
        self.rounds = options.rounds or (2 if options.quick else 5)
        #: whether a peer failed at something, which the others go on after
        self.failed = False

    def facts(self, peer: str, threads: int) -> dict[str, object]:
        return {
            "cpu": facts.gather().cpu_model,
            "isa": native.isa(),
            "threads": threads,
            "shape": SHAPE,
            "moestro": revision(),
            "peer": peer,
        }

    def finish(self, report: Report) -> None:
        if self.options.json and report.rows:
            print(report.save(self.options.out, self.probes.summary().as_dict()))

    def operators(self, peer: str) -> None:
        """The operator alone, each kind of weights that the peer has."""
        threads = 1 if peer == KT else self.options.threads
        native.set_threads(threads)
        engine = KtKernel(self.cache) if peer == KT else LlamaCpp(self.cache)
        engine.require()
        report = Report(
            peer=peer, part="operator", keys=("kind", "tokens"),
            facts=self.facts(engine.version, threads),
        )  # fmt: skip
        print(f"\nMoE operator, {SHAPE}, {threads} threads, per layer; ours and {peer}")
        for name in self.options.formats or list(KINDS):
            kind = KINDS.get(name)
            if kind is None or (kind.kt_method if peer == KT else kind.ggml_type) is None:
                continue
            try:
                self._operator(name, peer, threads, report)
            except PeerFailed as error:
                self.failed = True
                print(error, file=sys.stderr)
        self.finish(report)

    def _operator(self, name: str, peer: str, threads: int, report: Report) -> None:
        with self._case(name, peer, threads) as (ours, worker, case):
            mine, theirs = operators.check(case, ours, worker)
            errors = {"ours_error": asdict(mine), "peer_error": asdict(theirs)}
            how = worker.info["how"]
            print(f"{name}: relative error ours {mine}, peer ({how}) {theirs}")
            described = {"format": case.kind.format, "layers": self.options.layers}
            described |= {"peer_how": how} | errors
            for tokens in self.options.tokens:
                row = operators.measure(case, ours, worker, tokens, self.probes, self.rounds)
                print(line(report.add(row, **described), f"{name} {tokens:4d} tokens"), flush=True)

    @contextlib.contextmanager
    def _case(
        self, name: str, peer: str, threads: int
    ) -> Iterator[tuple[operators.OurOperator, Worker, operators.Case]]:
        layers = self.options.layers
        llama = LlamaCpp(self.cache)
        with tempfile.TemporaryDirectory(prefix="moestro-compare-") as folder:
            case = make_case(name, SHAPES[SHAPE], Path(folder) / name, llama)
            ours = operators.OurOperator(case, layers)
            if peer == KT:
                worker = KtKernel(self.cache).start_operator(
                    case.folder, threads=threads, layers=layers
                )
            else:
                worker = llama.start_operator(
                    case.folder, threads=threads, layers=layers, repack=peer == LLAMA
                )
            with worker:
                yield ours, worker, case

    def whole_models(self, peer: str) -> None:
        """Prefill and decode of whole models, each file type."""
        if peer == LLAMA:
            LlamaCpp(self.cache).require()
        threads = self.options.threads
        report: Report | None = None
        print(f"\nWhole model, {SHAPE}, {threads} threads, per layer and token; ours and {peer}")
        types = FILE_TYPES if peer == LLAMA else ("BF16",)
        deepest = max(int(task.rpartition("-")[2]) for task in self.options.tasks)
        for file_type in types:
            if self.options.formats and file_type not in self.options.formats:
                continue
            layers = self.options.model_layers
            model = model_path(self.options.models, SHAPE, layers, file_type)
            if not model.exists():
                raise FileNotFoundError(
                    f"{model} is not there; make it with\n  python benchmarks/make_gguf.py "
                    f"{self.options.models} --layers {layers} --cache {self.cache}"
                )
            context = deepest + whole_models.DECODED + 2
            with self._worker(peer, model, context) as worker:
                version = worker.info.get("version", LlamaCpp.version)
                report = report or self._model_report(peer, version)
                engine = whole_models.Resident(worker, decoded=whole_models.DECODED)
                session = Session(model, threads=threads, context=context)
                described: dict[str, Any] = {
                    "layers": layers,
                    "format": session.llm.loaded.format_name,
                }
                if peer == LLAMA:
                    described["disagreement"] = whole_models.check(session, engine)
                    print(
                        f"{file_type}: log probabilities differ by {described['disagreement']:.3f}"
                        " of their spread"
                    )
                for task in self._tasks(file_type):
                    row = whole_models.measure(
                        file_type, task, session, engine, self.probes, self.rounds
                    )
                    print(line(report.add(row, **described), f"{file_type} {task}"), flush=True)
                session.llm.close()
        if report:
            self.finish(report)

    def _tasks(self, file_type: str) -> list[str]:
        """The deep context, which takes long to fill, only for one type unless it is asked for."""
        if self.options.formats or not self.options.default_tasks:
            return list(self.options.tasks)
        return [task for task in self.options.tasks if task != TASKS[2] or file_type == "Q4_K_M"]

    def _model_report(self, peer: str, version: str) -> Report:
        return Report(
            peer=peer,
            part="model",
            keys=("file_type", "task"),
            facts=self.facts(version, self.options.threads),
        )

    def _worker(self, peer: str, model: Path, context: int) -> Worker:
        threads = self.options.threads
        if peer == LLAMA:
            return LlamaCpp(self.cache).start_model(model, threads=threads, context=context)
        config = whole_models.transformers_config(SHAPE, self.options.model_layers)
        return Worker(
            transformers_model.command(threads, config),
            environment={"OMP_NUM_THREADS": str(threads)},
            log=self.cache / TRANSFORMERS / "model.log",
        )


def revision() -> str:
    """The version in pyproject.toml, as the package need not be installed, and the last commit that
    changed what is measured, with a plus if there are changes beyond it.
    """
    root = peers_cache.ROOT
    declared = re.search(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    version = declared.group(1) if declared else __version__
    measured = ["--", "src", "csrc", "CMakeLists.txt"]
    last = _git("log", "-1", "--format=%h", *measured)
    changed = _git("status", "--porcelain", *measured)
    return f"{version} {last}{'+' if changed else ''}".strip()


def _git(*words: str) -> str:
    """What git says of this checkout; nothing where there is none."""
    command = ["git", "-C", str(peers_cache.ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def numbers(text: str) -> list[int]:
    return [int(part) for part in names(text)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = sorted({*OPERATOR_PEERS, *MODEL_PEERS})
    parser.add_argument("--peers", type=names, default="llama.cpp,kt-kernel", help=", ".join(known))
    parser.add_argument("--only", choices=["operator", "model"], help="one part")
    parser.add_argument("--formats", type=names, default="", help="kinds or file types, e.g. Q4_K")
    parser.add_argument("--tokens", type=numbers, default="1,4,16,64,512", help="of the operator")
    parser.add_argument("--tasks", type=names, default="", help=", ".join(TASKS))
    parser.add_argument("--rounds", type=int, help="default: 5, or 2 with --quick")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, nothing at 16k")
    parser.add_argument("--layers", type=int, default=2, help="layers of the operator in memory")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, default=peers_cache.DEFAULT, help="set up peers")
    parser.add_argument("--models", type=Path, default=peers_cache.DEFAULT / "models")
    parser.add_argument("--model-layers", type=int, default=4, help="of the files in --models")
    parser.add_argument("--skip-missing", action="store_true", help="go on without such peers")
    parser.add_argument("--json", action="store_true", help="add the rows to the files in --out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    for peer in options.peers:
        if peer not in known:
            parser.error(f"unknown peer {peer}; known: {', '.join(known)}")
    options.default_tasks = not options.tasks
    options.tasks = options.tasks or [*TASKS[: 2 if options.quick else 3]]
    for task in options.tasks:
        kind, _, number = task.partition("-")
        if kind not in ("prefill", "decode") or not number.isdigit():
            parser.error(f"unknown task {task}; tasks are prefill-512 and decode-CONTEXT")
    return options


def main() -> int:
    options = parse()
    torch.set_num_threads(1)  # its idle threads spin on the cores that are measured
    comparison = Comparison(options)
    comparison.probes.fma()
    for peer in options.peers:
        try:
            if peer in OPERATOR_PEERS and options.only != "model":
                comparison.operators(peer)
            if peer in MODEL_PEERS and options.only != "operator":
                comparison.whole_models(peer)
        except peers_cache.MissingPeer as error:
            if not options.skip_missing:
                print(f"{error}\nor leave it out with --skip-missing", file=sys.stderr)
                return 1
            print(f"SKIPPED: {peer} is not set up in {options.cache}", file=sys.stderr)
        except (PeerFailed, FileNotFoundError) as error:
            print(error, file=sys.stderr)
            comparison.failed = True
    return int(comparison.failed)


if __name__ == "__main__":
    sys.exit(main())

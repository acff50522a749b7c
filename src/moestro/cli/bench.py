"""``moestro bench``: prefill and decode speed of a model on this machine."""

from __future__ import annotations

import dataclasses
import random
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moestro.cli._models import open_llm, resolve_model
from moestro.cli._options import (
    DeviceOption,
    FormatsOption,
    JsonOption,
    ModelArgument,
    RevisionOption,
    options,
)
from moestro.cli._terminal import note, print_json
from moestro.core.errors import InvalidRequest
from moestro.core.units import format_bytes
from moestro.engine.config import EngineConfig

if TYPE_CHECKING:
    from moestro.engine.beside import Watch
    from moestro.engine.request import Completion
    from moestro.llm import LLM

#: tokens that only warm caches and threads up
_WARM_UP = 16


@options("engine", EngineConfig, without=("max_sequences",), max_sequences=1)
def bench(
    model: ModelArgument,
    prefill: Annotated[
        str, typer.Option("--prefill", help="prompt lengths to prefill, separated by commas")
    ] = "32,128,512",
    decode: Annotated[
        str, typer.Option("--decode", help="context lengths to decode at, separated by commas")
    ] = "16,512",
    tokens: Annotated[
        int, typer.Option("--tokens", min=2, help="tokens to decode at each context length")
    ] = 32,
    as_json: JsonOption = False,
    device: DeviceOption = "cpu",
    formats: FormatsOption = None,
    revision: RevisionOption = None,
    *,
    engine: EngineConfig,
) -> None:
    """Measure prefill and decode speed on random tokens, one sequence at a time."""
    from moestro.engine.beside import Watch

    prompts, contexts = lengths(prefill, "--prefill"), lengths(decode, "--decode")
    with open_llm(model, engine, device=device, formats=formats, revision=revision) as llm:
        prompts = fitting(prompts, llm.context - 1, "--prefill")
        contexts = fitting(contexts, llm.context - tokens, "--decode")
        measure(llm, _WARM_UP, 2)
        watch = Watch(llm.loaded.threads)
        report: dict[str, Any] = {
            "model": model,
            "format": llm.loaded.format_name,
            "isa": llm.loaded.isa,
            "threads": llm.loaded.threads,
            "prefill": [{"tokens": n, "tok_s": prefill_rate(llm, n)} for n in prompts],
            "decode": [{"context": n, "tok_s": decode_rate(llm, n, tokens)} for n in contexts],
            "streaming": streaming(llm),
            "load_s": round(llm.loaded.load_seconds, 3),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        why = _predict(report, llm, engine.max_batch_tokens, tokens, watch)
    if as_json:
        print_json(report)
    else:
        show(report)
        if why:
            note(why)


def _predict(report: dict[str, Any], llm: LLM, chunk: int, tokens: int, watch: Watch) -> str:
    """Put predictions beside what was measured. Returns why they differ, or why there are none."""
    from moestro.engine.beside import Beside, Speeds

    conditions = watch.stop()
    beside = Beside.of(llm.loaded, chunk=chunk, path=Path(resolve_model(report["model"])))
    if beside is None:
        return "predicted speeds need a measured machine: moestro doctor --measure"
    for row in report["prefill"]:
        row["predicted_tok_s"] = round(beside.prefill(row["tokens"]), 2)
    for row in report["decode"]:
        row["predicted_tok_s"] = round(beside.decode(row["context"], tokens), 2)
    rows = [*report["prefill"], *report["decode"]]
    speeds = [Speeds(measured=r["tok_s"], predicted=r["predicted_tok_s"]) for r in rows]
    report["explanation"] = beside.explain(speeds, conditions)
    return str(report["explanation"])


def lengths(text: str, option: str) -> list[int]:
    """``"32,128"`` -> [32, 128]. Raises InvalidRequest naming the option."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise InvalidRequest(f"{option} {text!r} must be positive whole numbers such as 32,128")
    return [int(part) for part in parts]


def fitting(wanted: Sequence[int], limit: int, option: str) -> list[int]:
    """The lengths within the limit; those beyond are named. Raises InvalidRequest if none is."""
    kept = [n for n in wanted if n <= limit]
    if not kept:
        raise InvalidRequest(f"{option}: none of {list(wanted)} fits; {limit} tokens do")
    if len(kept) < len(wanted):
        note(f"{option}: skipping what is beyond the context ({limit} tokens fit)")
    return kept


def measure(llm: LLM, prompt: int, answer: int) -> Completion:
    """Complete a random prompt that shares no prefix with an earlier one."""
    from moestro.engine.request import SamplingParams

    vocab = llm.loaded.description.spec.vocab_size
    ids = [random.randrange(vocab) for _ in range(prompt)]
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    return llm.generate(ids, params)[0]


def prefill_rate(llm: LLM, tokens: int) -> float:
    """Prompt tokens per second, from the first step to the first token."""
    return round(tokens / measure(llm, tokens, 1).timings.prefill, 2)


def decode_rate(llm: LLM, context: int, tokens: int) -> float:
    """Answer tokens per second after the first, the context growing from ``context``."""
    return round(measure(llm, context, tokens).timings.decode_rate(tokens), 2)


def streaming(llm: LLM) -> dict[str, Any] | None:
    """What was read from disk, as ``StreamStats`` says; None where nothing is."""
    if llm.loaded.streaming is None:
        return None
    stats = llm.loaded.streaming.stats()
    return {
        **dataclasses.asdict(stats),
        "hit_rate": round(stats.hit_rate, 4),
        "bytes_s": round(stats.rate),
        "text": str(stats),
    }


def show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    console.print(
        f"{report['model']} · {report['format']} · {report['isa']} · {report['threads']} threads · "
        f"loaded in {report['load_s']:.1f} s · peak {format_bytes(report['peak_rss_bytes'])}"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("tokens", justify="right")
    table.add_column("tok/s", justify="right")
    if any("predicted_tok_s" in row for row in report["decode"]):
        table.add_column("predicted", justify="right")
    for row in report["prefill"]:
        table.add_row("prefill", str(row["tokens"]), *_speeds(row))
    for row in report["decode"]:
        table.add_row("decode at", str(row["context"]), *_speeds(row))
    console.print(table)
    if report["streaming"] is not None:
        console.print(report["streaming"]["text"])


def _speeds(row: dict[str, Any]) -> list[str]:
    return [f"{row[key]:.1f}" for key in ("tok_s", "predicted_tok_s") if key in row]

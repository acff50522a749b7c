"""``moestro run``: one prompt, one answer, to stdout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from moestro.cli._models import open_llm, resolve_model
from moestro.cli._options import (
    CLI_SAMPLING,
    DeviceOption,
    FormatsOption,
    ModelArgument,
    RevisionOption,
    options,
)
from moestro.cli._terminal import note, stats_line, write
from moestro.core.errors import InvalidRequest
from moestro.engine.config import EngineConfig
from moestro.engine.request import SamplingParams


@options("engine", EngineConfig, without=("max_sequences",), max_sequences=1)
@options("sampling", SamplingParams, **CLI_SAMPLING)
def run(
    model: ModelArgument,
    prompt: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="the prompt; left out or '-': read it from stdin", show_default=False),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="put the prompt into the model's chat template")
    ] = False,
    system: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--system", help="a system message (with --chat)"),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="show token counts and speed on stderr at the end")
    ] = False,
    device: DeviceOption = "cpu",
    formats: FormatsOption = None,
    revision: RevisionOption = None,
    *,
    engine: EngineConfig,
    sampling: SamplingParams,
) -> None:
    """Complete one prompt and print the answer as it comes."""
    if system is not None and not chat:
        raise InvalidRequest("--system needs --chat: a raw completion has no system message")
    from moestro.engine.beside import Beside, Watch

    text = read_prompt(prompt)
    with open_llm(model, engine, device=device, formats=formats, revision=revision) as llm:
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": text})
        beside = None
        if stats:
            path = Path(resolve_model(model))
            beside = Beside.of(llm.loaded, chunk=engine.max_batch_tokens, path=path)
        watch = Watch(llm.loaded.threads)
        with llm.stream(messages if chat else text, sampling) as stream:
            for piece in stream:
                write(piece)
            write("\n")
            if stats:
                note(stats_line(stream.completion()))
                if beside is not None:
                    note(beside.line(stream.completion(), watch.stop()))
            if llm.loaded.streaming is not None:
                note(str(llm.loaded.streaming.stats()))


def read_prompt(prompt: str | None) -> str:
    """The prompt, or stdin as UTF-8. Raises InvalidRequest when there is nothing to read."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise InvalidRequest('no prompt: write moestro run MODEL "PROMPT", or pipe it into stdin')
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the prompt on stdin is not UTF-8: {error}") from None
    if not text:
        raise InvalidRequest("the prompt on stdin is empty")
    return text

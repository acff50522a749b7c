"""``moestro chat``: a conversation in the terminal."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from moestro.cli._models import open_llm
from moestro.cli._options import (
    CLI_SAMPLING,
    DeviceOption,
    FormatsOption,
    ModelArgument,
    RevisionOption,
    options,
)
from moestro.cli._terminal import note, stats_line, write
from moestro.core import env
from moestro.core.errors import InvalidRequest, MoestroError
from moestro.core.units import format_bytes
from moestro.engine.config import EngineConfig
from moestro.engine.request import Completion, SamplingParams

if TYPE_CHECKING:
    from moestro.llm import LLM, TextStream

HELP = """\
Enter sends; Alt+Enter (or Esc, Enter) starts a new line.
Ctrl-C stops the answer and keeps what came. Ctrl-D on an empty line leaves.
  /stats       speed and memory of the last answer
  /reset       forget the conversation
  /save FILE   write the conversation (Markdown, or JSON if FILE ends in .json)
  /help        this text"""


@options("engine", EngineConfig, without=("max_sequences",), max_sequences=1)
@options("sampling", SamplingParams, **CLI_SAMPLING, max_tokens=None)
def chat(
    model: ModelArgument,
    system: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--system", help="a system message that opens the conversation"),
    ] = None,
    device: DeviceOption = "cpu",
    formats: FormatsOption = None,
    revision: RevisionOption = None,
    *,
    engine: EngineConfig,
    sampling: SamplingParams,
) -> None:
    """Talk with a model. Ctrl-C stops an answer, Ctrl-D leaves; /help shows the commands."""
    with open_llm(model, engine, device=device, formats=formats, revision=revision) as llm:
        typed = sys.stdin.isatty()
        with Interrupts(leave_when_idle=not typed) as interrupts:
            talk = Conversation(llm=llm, sampling=sampling, interrupts=interrupts, system=system)
            talk.reset()
            if typed:
                note(f"{model} · /help for commands, Ctrl-D to leave")
            for text in typed_turns() if typed else (line.rstrip("\n") for line in sys.stdin):
                if text.strip():
                    talk.turn(text)


class Interrupts:
    """What Ctrl-C does: it stops the answer, between two steps of it; a second one before that ends
    the program. Without an answer it does nothing, as the prompt has its own meaning for it, or
    ends the program if ``leave_when_idle``.
    """

    def __init__(self, *, leave_when_idle: bool) -> None:
        self._leave_when_idle = leave_when_idle
        self._answering = False
        self._pressed = False
        self._stream: TextStream | None = None

    @contextmanager
    def answering(self) -> Iterator[Callable[[TextStream], None]]:
        """While an answer is made; call what it yields with the answer's stream."""
        self._answering, self._pressed = True, False
        try:
            yield self._watch
        finally:
            self._answering, self._stream = False, None

    def _watch(self, stream: TextStream) -> None:
        self._stream = stream
        if self._pressed:
            stream.cancel()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._pressed if self._answering else self._leave_when_idle:
            raise KeyboardInterrupt
        self._pressed = True
        if self._stream is not None:
            self._stream.cancel()

    def __enter__(self) -> Interrupts:
        self._previous: Any = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)


@dataclass(kw_only=True)
class Conversation:
    """The messages so far and what is done with the next line."""

    llm: LLM
    sampling: SamplingParams
    interrupts: Interrupts
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    last: Completion | None = None

    def turn(self, text: str) -> None:
        """A command, or a message to answer. Errors are said and end only this turn."""
        try:
            if text.startswith("/"):
                self.command(text)
            else:
                self.answer(text)
        except MoestroError as error:
            note(f"error: {error}")

    def answer(self, text: str) -> None:
        """Stream the answer to ``text``. What came before Ctrl-C is kept as the answer; if nothing
        did, the turn is forgotten.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        with self.interrupts.answering() as watch:
            with self.llm.stream(messages, self.sampling) as stream:
                watch(stream)
                for piece in stream:
                    write(piece)
            write("\n")
        self.last = stream.completion()
        if self.last.text:
            self.messages = [*messages, {"role": "assistant", "content": self.last.text}]
        note(f"[{stats_line(self.last)}]")

    def command(self, line: str) -> None:
        """Carry out a ``/command``. Raises InvalidRequest for one that does not exist."""
        name, _, argument = line[1:].strip().partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: note(HELP),
            "stats": lambda _: self.stats(),
            "reset": lambda _: self.reset(),
            "save": lambda path: self.save(path.strip()),
        }
        if name not in commands:
            raise InvalidRequest(f"there is no command /{name}; /help lists those there are")
        commands[name](argument)

    def reset(self) -> None:
        self.messages = []
        self.last = None
        if self.system is not None:
            self.messages = [{"role": "system", "content": self.system}]

    def stats(self) -> None:
        if self.last is None:
            note("no answer yet")
        else:
            usage = self.last.usage
            note(stats_line(self.last))
            note(f"context: {usage.total_tokens} of {self.llm.context} tokens used")
        note(f"memory: {format_bytes(self.llm.plan.ram.total)} for weights, KV cache and buffers")
        if self.llm.loaded.streaming is not None:
            note(str(self.llm.loaded.streaming.stats()))

    def save(self, path: str) -> None:
        """Write the conversation. Raises InvalidRequest without a name or where it fails."""
        if not path:
            raise InvalidRequest("/save needs a file name, for example: /save talk.md")
        target = Path(path).expanduser()
        try:
            target.write_text(transcript(self.messages, target.suffix), encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"cannot write {target}: {error.strerror or error}") from None
        note(f"saved {len(self.messages)} messages to {target}")


def transcript(messages: list[dict[str, str]], suffix: str) -> str:
    """The conversation as JSON for ``.json``, as Markdown otherwise."""
    if suffix == ".json":
        return json.dumps(messages, indent=2, ensure_ascii=False) + "\n"
    return "\n".join(f"## {m['role']}\n\n{m['content']}\n" for m in messages)


def typed_turns() -> Iterator[str]:
    """Lines typed in the terminal, with history, until Ctrl-D."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    history: History = InMemoryHistory()
    try:
        env.cache_dir().mkdir(parents=True, exist_ok=True)
        file = env.cache_dir() / "chat_history"
        file.touch()
        history = FileHistory(str(file))
    except OSError as error:
        note(f"the history is not kept: {error}")
    session: PromptSession[str] = PromptSession(
        "> ", history=history, key_bindings=keys, multiline=True, prompt_continuation="  "
    )
    while True:
        try:
            yield session.prompt()
        except KeyboardInterrupt:
            note("(Ctrl-D leaves)")
        except EOFError:
            return

"""A peer in a process of its own: a line with a request goes in, a line of JSON comes back.

Between requests the process is stopped (SIGSTOP), so that threads which go on polling after their
work take nothing from what is measured next.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any


class PeerFailed(Exception):
    """A peer ended or answered with an error; carries the end of what it wrote."""


class Worker:
    """Starts ``command`` and waits for its first line, which describes it (``info``).

    environment: variables set for it in addition. log: file that gets its standard error.
    """

    def __init__(self, command: Sequence[str], *, environment: dict[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._command, self._log = list(command), log
        settings = [f"{name}={value}" for name, value in environment.items()]
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                ["env", *settings, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
            )
        self.info = self._answer()
        self._stop()

    def ask(self, request: str) -> dict[str, Any]:
        """Let it run until it has answered. Raises PeerFailed."""
        self._process.send_signal(signal.SIGCONT)
        try:
            stream = _pipe(self._process.stdin)
            stream.write(request + "\n")
            stream.flush()
        except BrokenPipeError:
            raise self._failure("it ended before it could be asked") from None
        answer = self._answer()
        self._stop()
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            _pipe(stream).close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stop(self) -> None:
        """Returns when it stands still."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def _answer(self) -> dict[str, Any]:
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise self._failure("it ended without an answer")
        try:
            answer = json.loads(line)
        except ValueError:
            raise self._failure(f"it answered {line!r}") from None
        if "error" in answer:
            raise self._failure(str(answer["error"]))
        return answer

    def _failure(self, what: str) -> PeerFailed:
        self.close()
        what += f" (exit status {self._process.returncode})"
        tail = self._log.read_text(errors="replace")[-2000:]
        return PeerFailed(f"{' '.join(self._command)}: {what}\n{tail}\n(the whole: {self._log})")


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise AssertionError("the process was started with pipes")
    return stream

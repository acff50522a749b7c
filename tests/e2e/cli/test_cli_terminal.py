"""``moestro chat`` in a terminal of its own: typed at, interrupted, left."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import tiny_checkpoint
from command_lines import REFERENCE

#: what the prompt writes when it begins and ends to take input
BRACKETED_PASTE_ON, BRACKETED_PASTE_OFF = r"\x1b\[\?2004h", r"\x1b\[\?2004l"


class Terminal:
    """A command in a terminal of its own, typed at and read from."""

    def __init__(self, arguments: list[str], cache: Path) -> None:
        master, slave = pty.openpty()
        environment = {
            **os.environ,
            "TERM": "xterm",
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "MOESTRO_CACHE": str(cache),
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moestro", *arguments],
            stdin=slave, stdout=slave, stderr=slave, env=environment,
            preexec_fn=os.setsid,
        )  # fmt: skip
        os.close(slave)
        self.master = master
        self.screen, self.seen = "", 0

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, pattern: str, seconds: float = 90) -> str:
        """Read until the pattern shows after what was found last; returns what is up to it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.screen += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # the other side is gone
                    break
            if found := re.search(pattern, self.screen[self.seen :]):
                start, self.seen = self.seen, self.seen + found.end()
                return self.screen[start : self.seen]
        raise AssertionError(f"{pattern!r} did not come; the screen has:\n{self.screen}")

    def close(self) -> int:
        try:
            return self.process.wait(timeout=60)
        finally:
            if self.process.poll() is None:
                self.process.kill()
            os.close(self.master)


def test_chat_in_a_terminal(tmp_path: Path, cache: Path) -> None:
    model = tiny_checkpoint.write(tmp_path / "model", context=8192)
    endless = ["--max-tokens", "8000", "--temperature", "0", "--ignore-eos"]
    terminal = Terminal(["chat", str(model), *REFERENCE, *endless], cache)
    terminal.wait_for("Ctrl-D to leave")
    for typed in ("first\r", "two\x1b\rlines\r"):
        terminal.wait_for(BRACKETED_PASTE_ON)
        terminal.type(typed)
        terminal.wait_for(BRACKETED_PASTE_OFF + r"\s*[^\s\x1b]")  # the answer has begun
        terminal.process.send_signal(signal.SIGINT)  # stops the answer, not the session
        assert "cancelled" in terminal.wait_for(r"answer tokens .*\]")
    terminal.wait_for(BRACKETED_PASTE_ON)
    terminal.type("/stats\r")
    terminal.wait_for("tokens used")
    terminal.wait_for(BRACKETED_PASTE_ON)  # before it, Ctrl-D would be the line discipline's
    terminal.type("\x04")
    assert terminal.close() == 0
    history = (cache / "chat_history").read_text()
    assert "+first" in history and "+two\n+lines" in history

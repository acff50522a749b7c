"""The commands as a person runs them: answers, files, and an exit code with a message when not."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_checkpoint
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moestro import LLM, SamplingParams, formats, native
from moestro.cli.main import main
from moestro.core.errors import InvalidRequest
from moestro.devices.cpu import self_check

REFERENCE = ("--device", "reference", "--threads", "1")
GREEDY = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOESTRO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def moestro(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in this process; returns (exit code, stdout, stderr)."""

    def run(*arguments: object, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(end.value.code or 0), out, err

    return run


Run = Callable[..., tuple[int, str, str]]


def test_run_prints_the_answer_of_the_python_face(model: Path, moestro: Run) -> None:
    with LLM(model, device="reference", threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        raw = llm.generate("hello", params)[0].text
        answer = llm.chat([{"role": "user", "content": "hello"}], params).text
    assert moestro("run", model, "hello", *REFERENCE, *GREEDY) == (0, raw + "\n", "")
    assert moestro("run", model, *REFERENCE, *GREEDY, stdin=b"hello")[1] == raw + "\n"
    assert moestro("run", model, "-", *REFERENCE, *GREEDY, stdin=b"hello")[1] == raw + "\n"
    assert moestro("run", model, "hello", "--chat", *REFERENCE, *GREEDY)[1] == answer + "\n"


def test_the_default_device_has_our_kernels(model: Path, moestro: Run) -> None:
    code, native, _ = moestro("run", model, "hello", *GREEDY)
    assert code == 0
    assert native == moestro("run", model, "hello", *REFERENCE, *GREEDY)[1]
    code, out, _ = moestro("bench", model, "--prefill", "8", "--decode", "8", "--json")
    assert json.loads(out)["isa"] == json.loads(moestro("doctor", "--json")[1])["native"]["isa"]


def test_run_says_how_fast_it_was_when_asked(model: Path, moestro: Run) -> None:
    code, _, err = moestro("run", model, "hello", "--stats", *REFERENCE, *GREEDY)
    assert code == 0
    assert re.fullmatch(
        r"5 prompt tokens \([\d.]+ tok/s\) · 8 answer tokens \([\d.]+ tok/s\) · length\n", err
    )


def test_piped_chat_answers_line_by_line_and_keeps_the_conversation(
    model: Path, moestro: Run, tmp_path: Path
) -> None:
    markdown, plain = tmp_path / "talk.md", tmp_path / "talk.json"
    lines = f"hello\n\nand?\n/stats\n/save {markdown}\n/save {plain}\n/reset\n/save {plain}2.json\n"
    arguments = ("chat", model, "--system", "Be brief.", *REFERENCE, *GREEDY)
    code, _, err = moestro(*arguments, stdin=lines.encode())
    assert code == 0
    talk = json.loads(plain.read_text())
    assert [m["role"] for m in talk] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in talk if m["role"] == "user"] == ["hello", "and?"]
    assert "## user\n\nhello\n" in markdown.read_text()
    assert json.loads(Path(f"{plain}2.json").read_text()) == talk[:1]
    assert re.search(r"\[\d+ prompt tokens \(\d+ reused, ", err), "the second turn must reuse"
    assert "of 512 tokens used" in err


def test_an_error_in_a_turn_ends_only_the_turn(model: Path, moestro: Run, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    lines = f"{'x' * 600}\n/nonsense\n/save\n/save {tmp_path}\nhello\n/save {saved}\n"
    code, out, err = moestro("chat", model, *REFERENCE, *GREEDY, stdin=lines.encode())
    assert code == 0
    for message in (
        "context holds 512",
        "no command /nonsense",
        "needs a file name",
        "cannot write",
    ):
        assert message in err
    assert json.loads(saved.read_text())[0]["content"] == "hello"
    assert out.strip()


def test_bench_has_exactly_the_documented_schema(model: Path, moestro: Run) -> None:
    arguments = ("--prefill", "8,40", "--decode", "8", "--tokens", "3", *REFERENCE)
    code, out, _ = moestro("bench", model, "--json", *arguments)
    assert code == 0
    report = json.loads(out)
    assert list(report) == [
        "model", "format", "isa", "threads", "prefill", "decode", "load_s", "peak_rss_bytes",
    ]  # fmt: skip
    assert [list(row) for row in report["prefill"]] == [["tokens", "tok_s"]] * 2
    assert [row["tokens"] for row in report["prefill"]] == [8, 40]
    assert [list(row) for row in report["decode"]] == [["context", "tok_s"]]
    assert all(row["tok_s"] > 0 for row in [*report["prefill"], *report["decode"]])
    assert (report["format"], report["isa"], report["threads"]) == ("f32", "torch", 1)
    assert report["peak_rss_bytes"] > 2**20 and report["load_s"] > 0
    code, out, err = moestro("bench", model, "--prefill", "8,9000", "--decode", "8", *REFERENCE)
    assert code == 0
    assert "prefill" in out and "decode at" in out and "peak" in out
    assert "skipping" in err


def test_convert_writes_a_model_that_runs(model: Path, moestro: Run, tmp_path: Path) -> None:
    out_dir = tmp_path / "packed"
    code, out, err = moestro("convert", model, out_dir, "--format", "int8-g32")
    assert code == 0
    assert "int8-g32" in out and "%" in out
    assert "largest error: layers." in err and str(out_dir) in err
    code, first, _ = moestro("run", out_dir, "hello", *REFERENCE, *GREEDY)
    assert code == 0 and first.strip()
    code, direct, _ = moestro("run", model, "hello", "--formats", "int8-g32", *REFERENCE, *GREEDY)
    assert direct == first


def test_doctor_reports_the_machine(moestro: Run) -> None:
    code, out, _ = moestro("doctor", "--json")
    assert code == 0
    report = json.loads(out)
    assert {"machine", "native", "devices", "formats", "memory", "fallbacks", "versions"} <= set(
        report
    )
    assert report["formats"] == formats.names()
    assert report["threads"] >= 1
    assert 0 < report["memory"]["budget"] <= report["memory"]["total"]
    assert {row["number"] for row in report["machine"]["numa_nodes"]}
    assert report["huge_pages"]["share"] is None or 0 <= report["huge_pages"]["share"] <= 1
    code, out, _ = moestro("doctor")
    assert code == 0
    assert "CPU" in out and "kernels" in out and "budget" in out and "huge pages" in out
    assert "same bits" in out and report["native"]["same_bits"] is True


def test_doctor_checks_every_kernel_and_fits_the_terminal(
    moestro: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = json.loads(moestro("doctor", "--json")[1])
    assert list(report["self_check"]) == native.built_isas()
    for isa, row in report["self_check"].items():
        names = formats.names() if isa in native.supported_isas() else []
        assert sorted(row) == names
        assert set(row.values()) <= {"ok", "not built"}
    assert report["self_check"][native.isa()]["int4-g32"] == "ok"
    monkeypatch.setenv("COLUMNS", "100")
    wide = moestro("doctor")[1]
    assert re.search(r"^format +scalar", wide, re.MULTILINE) and f"{native.isa()}*" in wide
    assert re.search(r"^int4 g32 g64 g128 row +ok", wide, re.MULTILINE)
    monkeypatch.setenv("COLUMNS", "34")
    narrow = moestro("doctor")[1]
    assert max(len(line.rstrip()) for line in narrow.splitlines()) <= 34
    assert re.search(r"^scalar.*: \d+ of \d+ formats", narrow, re.MULTILINE)


def test_wrong_kernels_are_shown_and_no_model_is_loaded_with_them(
    model: Path, moestro: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = native.core.multiply

    def multiply(isa: str, x: Tensor, name: str, data: Tensor, n: int, k: int, out: Tensor) -> None:
        right(isa, x, name, data, n, k, out)
        if isa == native.isa() and name in ("f32", "int4-g64"):
            out[0, 3] += 1

    monkeypatch.setattr(native.core, "multiply", multiply)
    monkeypatch.setattr(self_check, "_passed", set())
    code, out, _ = moestro("doctor")
    assert code == 8
    assert re.search(r"^int4 g32 g128 row .*ok", out, re.MULTILINE)
    assert re.search(r"^int4 g64 .*FAILED", out, re.MULTILINE)
    assert f"int4-g64 on {native.isa()}: token 0 of 1, channel 3: " in out
    code, _, err = moestro("run", model, "hello", *GREEDY)
    assert code == 8 and "format f32 on instruction set" in err and "MOESTRO_ISA=" in err
    assert moestro("run", model, "hello", *REFERENCE, *GREEDY)[0] == 0


def test_version_and_help(moestro: Run) -> None:
    assert re.fullmatch(r"moestro \S+\n", moestro("--version")[1])
    code, out, _ = moestro("--help")
    assert code == 0 and "chat" in out


@pytest.mark.parametrize(
    ("code", "message", "arguments"),
    [
        (2, "No such option", ["run", "MODEL", "hi", "--nonsense"]),
        (2, "No such command", ["fly"]),
        (2, "Missing argument", ["chat"]),
        (2, "unknown device 'abacus'; known:", ["run", "MODEL", "hi", "--device", "abacus"]),
        (2, "context holds 512", ["run", "MODEL", "x" * 600]),
        (2, "no tokens", ["run", "MODEL", ""]),
        (2, "stdin is empty", ["run", "MODEL"]),
        (2, "--system needs --chat", ["run", "MODEL", "hi", "--system", "x"]),
        (2, "temperature=-1.0", ["run", "MODEL", "hi", "--temperature", "-1"]),
        (2, "top_p=2.0", ["chat", "MODEL", "--top-p", "2"]),
        (2, "threads must be", ["run", "MODEL", "hi", "--threads", "0"]),
        (2, "page_size must be", ["run", "MODEL", "hi", "--page-size", "24"]),
        (2, "'lots' is not a size", ["run", "MODEL", "hi", "--memory", "lots"]),
        (2, "kv_dtype must be", ["run", "MODEL", "hi", "--kv-dtype", "int3"]),
        (2, "9000 is more than the 512", ["run", "MODEL", "hi", "--context", "9000"]),
        (7, "does not fit into the memory budget", ["run", "MODEL", "hi", "--memory", "300KB"]),
        (7, "budget", ["run", "MODEL", "hi", "--memory", "0"]),
        (4, "unknown format 'int3'", ["run", "MODEL", "hi", "--formats", "int3"]),
        (4, "unknown format 'int3'", ["convert", "MODEL", "OUT", "--format", "int3"]),
        (2, "not a kind of weight", ["convert", "MODEL", "OUT", "--format", "wings=int8-g32"]),
        (2, "--prefill", ["bench", "MODEL", "--prefill", "many"]),
        (2, "--decode", ["bench", "MODEL", "--decode", "9000"]),
        (3, "does not exist", ["run", "/nonexistent/model", "hi"]),
        (3, "make demo", ["chat", "demo"]),
    ],
)
def test_bad_input_is_a_message_and_an_exit_code(
    code: int, message: str, arguments: list[str], model: Path, tmp_path: Path, moestro: Run
) -> None:
    places = {"MODEL": str(model), "OUT": str(tmp_path / "out")}
    arguments = [places.get(argument, argument) for argument in arguments]
    if arguments[0] in ("run", "chat", "bench") and "--device" not in arguments:
        arguments += ["--device", "reference"]
    got, out, err = moestro(*arguments)
    assert (got, out) == (code, "")
    assert message in err
    assert not (tmp_path / "out").exists()


def damage(model: Path, folder: Path, how: str) -> Path:
    """A copy of the model with one thing wrong."""
    shutil.copytree(model, folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(weights)
    name = next(key for key in tensors if key.endswith("1.w1.weight"))
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
        return folder
    if how == "corrupt":
        weights.write_bytes(b"\xff" * 8 + weights.read_bytes()[8:])
        return folder
    if how == "architecture":
        config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "abacus"}))
    elif how == "missing expert":
        del tensors[name]
    elif how == "shape":
        tensors[name] = tensors[name][:, :-1].contiguous()
    elif how == "not finite":
        tensors[name][0, 0] = torch.nan
    save_file(tensors, weights)
    return folder


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("truncated", 3, "model.safetensors"),
        ("corrupt", 3, "model.safetensors"),
        ("architecture", 5, "abacus"),
        ("missing expert", 3, "1.w1.weight"),
        ("shape", 3, "1.w1.weight"),
        ("not finite", 3, "1.w1.weight"),
    ],
)
@pytest.mark.parametrize("command", ["run", "convert"])
def test_damaged_models_are_refused_by_name_and_leave_nothing(
    how: str, code: int, message: str, command: str, model: Path, tmp_path: Path, moestro: Run
) -> None:
    bad, out_dir = damage(model, tmp_path / "bad", how), tmp_path / "out"
    more = ["hi", *REFERENCE] if command == "run" else [str(out_dir), "--format", "int8-g32"]
    got, out, err = moestro(command, bad, *more)
    assert (got, out) == (code, "")
    assert message in err
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "cache") == ["bad"]


def test_outputs_that_cannot_be_used_are_refused(model: Path, tmp_path: Path, moestro: Run) -> None:
    full, file = tmp_path / "full", tmp_path / "file"
    full.mkdir()
    (full / "precious.txt").write_text("keep me")
    file.write_text("keep me too")
    for target in (full, file, file / "below"):
        code, _, err = moestro("convert", model, target, "--format", "int8-g32")
        assert code != 0
        assert str(file if target != full else full) in err
    assert (full / "precious.txt").read_text() == "keep me"
    assert file.read_text() == "keep me too"


def test_stdin_that_is_not_text_is_refused(model: Path, moestro: Run) -> None:
    code, _, err = moestro("run", model, *REFERENCE, stdin=b"\xff\xfe")
    assert code == 2
    assert "not UTF-8" in err


def test_environment_variables_are_checked(
    model: Path, moestro: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESTRO_THREADS", "many")
    code, _, err = moestro("run", model, "hi", "--device", "reference")
    assert code == InvalidRequest.exit_code
    assert "MOESTRO_THREADS='many'" in err


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

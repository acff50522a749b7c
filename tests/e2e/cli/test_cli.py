"""The commands as a person runs them: answers and files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_lines import GREEDY, REFERENCE, Run
from torch import Tensor

from moestro import LLM, SamplingParams, formats, native
from moestro.devices.cpu import self_check


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
        "model", "format", "isa", "threads", "prefill", "decode", "streaming", "load_s",
        "peak_rss_bytes",
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
    again = ("convert", model, out_dir, "--format", "int8-g32", "--verify")
    code, _, err = moestro(*again)
    assert code == 0 and "verified: every file is what was written" in err
    shared = bytearray((out_dir / "shared.safetensors").read_bytes())
    shared[-1] ^= 1
    (out_dir / "shared.safetensors").write_bytes(shared)
    code, _, err = moestro(*again)
    assert code == 3 and "shared.safetensors is damaged" in err


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
    assert "disk reads" in out and "same bits" in out and report["native"]["same_bits"] is True


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


def test_a_model_bigger_than_the_budget_runs_and_says_so(
    model: Path, moestro: Run, tmp_path: Path
) -> None:
    packed = tmp_path / "packed"
    assert moestro("convert", model, packed, "--formats", "experts=int4-g32")[0] == 0
    with LLM(packed, max_sequences=1, context=128, max_batch_tokens=32) as llm:
        budget = llm.plan.ram.total - 20000
    limits = ("--memory", f"{budget}B", "--context", "128", "--max-batch-tokens", "32")
    code, out, err = moestro("run", packed, "hello", *limits, *GREEDY)
    assert code == 0
    assert out == moestro("run", packed, "hello", *GREEDY)[1]
    line = r"experts from disk: \d+ of \d+ in memory, \d+% found there, [\d.]+ \w+ read at .*/s\n"
    assert re.fullmatch(line, err)
    arguments = ("bench", packed, "--prefill", "8", "--decode", "8", "--tokens", "2", *limits)
    assert re.search(line, moestro(*arguments)[1])
    report = json.loads(moestro(*arguments, "--json")[1])
    assert 0 < report["streaming"]["slots"] < report["streaming"]["experts"]
    assert json.loads(moestro(*arguments[:2], *arguments[2:8], "--json")[1])["streaming"] is None
    code, _, err = moestro("chat", packed, *limits, *GREEDY, stdin=b"hello\n/stats\n")
    assert code == 0 and re.search(line, err)

"""What the commands cannot do: an exit code, a message that names the thing, and nothing left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from command_lines import REFERENCE, Run
from safetensors.torch import load_file, save_file

from moestro.core.errors import InvalidRequest


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

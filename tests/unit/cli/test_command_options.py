"""Options generated from dataclasses, model names, and what importing the command line costs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import moestro
from moestro.cli import main as command_line
from moestro.cli._models import resolve_model
from moestro.cli._options import options
from moestro.core.errors import CheckpointError, InvalidRequest


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """Options of every kind."""

    heat: float = field(default=1.0, metadata={"help": "how hot"})
    count: int | None = field(default=None, metadata={"help": "how many"})
    end: tuple[str, ...] = field(default=(), metadata={"help": "where to end"})
    loud: bool = field(default=False, metadata={"help": "say it loud"})
    hidden: int = field(default=3, metadata={"help": "no option"})

    def __post_init__(self) -> None:
        if self.heat < 0:
            raise InvalidRequest(f"heat {self.heat} is below zero")


def invoke(*arguments: str, **changes: Any) -> tuple[Any, Any]:
    seen: list[Any] = []
    app = typer.Typer()

    @app.command()
    @options("knobs", Knobs, without=("hidden",), **changes)
    def command(name: str, *, knobs: Knobs) -> None:
        seen.append((name, knobs))

    result = CliRunner().invoke(app, list(arguments))
    return result, seen[0] if seen else None


def test_options_build_the_object() -> None:
    _, seen = invoke("x", "--heat", "2.5", "--count", "4", "--end", "a", "--end", "b", "--loud")
    assert seen == ("x", Knobs(heat=2.5, count=4, end=("a", "b"), loud=True))


def test_without_options_the_defaults_hold_and_may_be_replaced() -> None:
    assert invoke("x")[1] == ("x", Knobs())
    assert invoke("x", heat=0.7, hidden=9)[1] == ("x", Knobs(heat=0.7, hidden=9))


def test_help_is_the_metadata_and_left_out_fields_are_no_options() -> None:
    result, _ = invoke("--help")
    assert "how hot" in result.output and "--count" in result.output
    assert "hidden" not in result.output
    assert invoke("x", "--hidden", "2")[0].exit_code == 2


def test_the_dataclass_checks_the_values() -> None:
    result, seen = invoke("x", "--heat", "-1")
    assert seen is None
    assert isinstance(result.exception, InvalidRequest)


@pytest.mark.parametrize("bad", [["--heat", "warm"], ["--count", "1.5"], ["--nonsense"]])
def test_usage_errors_exit_with_two(bad: list[str]) -> None:
    result, seen = invoke("x", *bad)
    assert (result.exit_code, seen) == (2, None)


def test_a_built_name_is_resolved_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESTRO_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="make demo"):
        resolve_model("demo")
    (tmp_path / "models" / "demo").mkdir(parents=True)
    assert resolve_model("demo") == str(tmp_path / "models" / "demo")
    assert resolve_model("owner/name") == "owner/name"


def test_every_command_has_a_module_and_help() -> None:
    runner = CliRunner()
    listing = runner.invoke(command_line.app, ["--help"]).output
    folder = Path(command_line.__file__).parent
    modules = {p.stem for p in folder.glob("[a-z]*.py")} - {"main"}
    assert modules == set(command_line.COMMANDS)
    for name in command_line.COMMANDS:
        assert name in listing
        assert "--help" in runner.invoke(command_line.app, [name, "--help"]).output


@pytest.mark.parametrize(
    "code",
    [
        "import moestro",
        "import moestro.cli.main",
        "from moestro.cli.main import app; app(['--help'], standalone_mode=False)",
        "from moestro.cli.main import app; app(['chat', '--help'], standalone_mode=False)",
        "import moestro; moestro.__version__; dir(moestro)",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str) -> None:
    heavy = "{'torch', 'tokenizers', 'huggingface_hub', 'numpy', 'prompt_toolkit'}"
    check = f"import sys\n{code}\nfound = {heavy} & set(sys.modules)\nassert not found, found"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_public_names_are_there_and_others_are_not() -> None:
    assert set(moestro.__all__) <= set(dir(moestro))
    assert moestro.SamplingParams(temperature=0).greedy
    assert moestro.__version__
    with pytest.raises(AttributeError, match="no attribute 'LLLM'"):
        moestro.LLLM  # noqa: B018

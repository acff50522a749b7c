"""The ``moestro`` command: collects the commands, turns errors into messages and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from moestro.core.errors import MoestroError

#: in the order of --help; each is a module here with a function of the same name
COMMANDS = ("chat", "run", "demo", "bench", "convert", "plan", "doctor")

app = typer.Typer(
    name="moestro",
    help="Run Mixture-of-Experts language models that are bigger than your GPU and your RAM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from moestro import __version__

        print(f"moestro {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Run Mixture-of-Experts language models that are bigger than your GPU and your RAM."""


for _name in COMMANDS:
    app.command(_name)(getattr(import_module(f"moestro.cli.{_name}"), _name))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit. A MoestroError becomes its message and its exit code."""
    try:
        app(args=None if argv is None else list(argv), prog_name="moestro")
    except MoestroError as error:
        print(f"moestro: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader of a pipe is gone (as with `| head`); nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None

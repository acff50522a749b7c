"""Command line options made from dataclass fields, so that every knob is defined once."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any, Optional

import typer

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="a directory or .gguf/.safetensors file, a packed directory, a Hugging Face id, "
        "or 'demo'",
        show_default=False,
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="where to compute")]
RevisionOption = Annotated[
    Optional[str],  # noqa: UP045  typer reads this at run time on every Python we support
    typer.Option("--revision", help="branch, tag or commit of a Hugging Face id"),
]
FormatsOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--formats",
        "--format",
        help="quantize while loading: one format for all matrices, or per role, for example "
        "experts=FORMAT,attention=FORMAT; default: the checkpoint's own types, without loss",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object instead")]

#: sampling in the terminal: no options for what only programs read, and a little cooler than the
#: models' own distribution, as chat programs do
CLI_SAMPLING: dict[str, Any] = {
    "without": ("logprobs", "logit_bias"),
    "temperature": 0.7,
    "top_p": 0.95,
}

Command = Callable[..., None]


def options(
    name: str, cls: type, /, *, without: Collection[str] = (), **defaults: Any
) -> Callable[[Command], Command]:
    """Give a command one option per field of a dataclass.

    ``@options("engine", EngineConfig)`` replaces the command's parameter ``engine`` by
    the fields of EngineConfig (with the help in their metadata) and passes the built object;
    building it checks the values. ``without`` names fields that get no option, ``defaults``
    replaces the class's own.
    """
    hints = typing.get_type_hints(cls)
    fields = [f for f in dataclasses.fields(cls) if f.name not in without]
    fixed = {key: value for key, value in defaults.items() if key in without}

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters
        parameters = [p for key, p in own.items() if key != name]
        for field in fields:
            default = defaults.get(field.name, field.default)
            parameters.append(_parameter(field, hints[field.name], default))

        def wrapper(**values: Any) -> None:
            chosen = {field.name: values.pop(field.name) for field in fields}
            chosen = {k: tuple(v) if isinstance(v, list) else v for k, v in chosen.items()}
            command(**values, **{name: cls(**fixed, **chosen)})

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [p.replace(kind=keyword) for p in parameters]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        wrapper.__doc__, wrapper.__name__ = command.__doc__, command.__name__
        return wrapper

    return decorate


def _parameter(field: dataclasses.Field[Any], hint: Any, default: Any) -> inspect.Parameter:
    """A keyword parameter that typer reads as ``--field-name`` with the field's type and help."""
    default = list(default) if isinstance(default, tuple) else default
    option = typer.Option(
        "--" + field.name.replace("_", "-"),
        help=field.metadata["help"],
        show_default=default not in (None, [], False),
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[_typer_type(hint), option],
    )


def _typer_type(hint: Any) -> Any:
    """What typer takes: int | None -> Optional[int], tuple[str, ...] -> list[str]."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in args if a is not type(None)]
        return Optional[inner[0]]  # noqa: UP045
    if origin is tuple:
        return list[args[0]]  # type: ignore[valid-type]
    return hint

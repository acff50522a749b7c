"""What a user may write for MODEL, and the one place where commands open one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moestro.cli._terminal import byte_progress
from moestro.core import env
from moestro.core.errors import CheckpointError

if TYPE_CHECKING:
    from moestro.engine.config import EngineConfig
    from moestro.llm import LLM

#: names resolved inside the cache directory, with the command that makes them
BUILT_NAMES = {"demo": "make demo"}


def resolve_model(name: str) -> str:
    """A name such as ``demo`` -> its packed directory in the cache; anything else as it is.

    Raises CheckpointError with the command that builds it when the directory is not there.
    """
    if name not in BUILT_NAMES or Path(name).exists():
        return name
    path = env.cache_dir() / "models" / name
    if not path.is_dir():
        raise CheckpointError(
            f"the model {name!r} is not in {path}; build it with: {BUILT_NAMES[name]}"
        )
    return str(path)


def open_llm(model: str, engine: EngineConfig, **options: Any) -> LLM:
    """Load a model with a progress bar on a terminal."""
    import dataclasses

    from moestro.llm import LLM

    knobs = {f.name: getattr(engine, f.name) for f in dataclasses.fields(engine)}
    with byte_progress(f"loading {model}") as progress:
        return LLM(resolve_model(model), progress=progress, **options, **knobs)

"""``moestro demo``: builds the demo model in the cache, once, and lets it answer a question."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from moestro.cli._models import open_llm, resolve_model
from moestro.cli._terminal import byte_progress, note, stats_line, write
from moestro.core import env
from moestro.core.errors import CheckpointError, InvalidRequest
from moestro.core.units import format_bytes

RECORD = "demo.json"


def demo(
    ask: Annotated[str, typer.Option("--ask", help="The question.")] = "Why is the sky blue?",
    noise: Annotated[
        float, typer.Option("--noise", help="Each expert weight is multiplied by 1 + X * N(0, 1).")
    ] = 0.1,
    formats: Annotated[
        Optional[str],  # noqa: UP045  typer reads this at run time on every Python we support
        typer.Option(
            "--format", help="Formats of the packed model. Default: experts in 4 bits, rest in 8."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Length of the answer.")] = 160,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Build again if it is there.")] = False,
) -> None:
    """Build a small mixture of experts from SmolLM2-135M and ask it a question."""
    from moestro.engine.config import EngineConfig
    from moestro.engine.request import SamplingParams

    if not ask.strip():
        raise InvalidRequest("--ask is empty; write a question")
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    folder = ensure_built(noise=noise, policy=formats, rebuild=rebuild)
    size = sum(file.stat().st_size for file in folder.iterdir())
    note(f"{description(noise)}\n{folder} ({format_bytes(size)})\n")
    with open_llm("demo", EngineConfig(max_sequences=1)) as llm:
        write(f"> {ask}\n\n")
        with llm.stream([{"role": "user", "content": ask}], sampling) as stream:
            for piece in stream:
                write(piece)
            write("\n\n")
            note(f"[{stats_line(stream.completion())}]")


def description(noise: float) -> str:
    """What the model honestly is."""
    from moestro.models.upcycle import DEMO_SOURCE, Recipe

    recipe = Recipe(noise=noise)
    return (
        f"The demo model is a {recipe.experts}-expert mixture made from {DEMO_SOURCE} by copying "
        f"each MLP {recipe.experts} times with {noise:.0%} noise and routing to {recipe.top_k} of "
        "them at random. It is not a trained MoE and knows no more than the small model it is "
        "made from."
    )


def ensure_built(*, noise: float, policy: str | None, rebuild: bool) -> Path:
    """The packed directory of the demo model in the cache, built unless it is there already.

    Raises CheckpointError when the source is not installed or the cache cannot be written.
    """
    from moestro import formats
    from moestro.memory.policy import FormatPolicy
    from moestro.models.upcycle import DEMO_PACKAGE, Recipe

    policy = policy or f"{formats.DEFAULT_SHARED},experts={formats.DEFAULT}"
    record = {"source": DEMO_PACKAGE, "noise": noise, "formats": policy}
    folder = env.cache_dir() / "models" / "demo"
    if not rebuild and _record(folder) == record:
        return Path(resolve_model("demo"))
    recipe, chosen = Recipe(noise=noise), FormatPolicy.parse(policy)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside its target, so that the finished model moves there in one step.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".demo-") as scratch:
            built = _build(Path(scratch), recipe, chosen)
            (built / RECORD).write_text(json.dumps(record, indent=2) + "\n")
            if folder.exists():
                shutil.rmtree(folder)
            built.rename(folder)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the demo model into {folder.parent}: {error.strerror or error}; free "
            "some space or choose another cache with MOESTRO_CACHE"
        ) from error
    return folder


def _record(folder: Path) -> Any:
    """How the model that is there was made; None if it is not there or not readable."""
    try:
        return json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return None


def _build(scratch: Path, recipe: Any, policy: Any) -> Path:
    """Upcycle the source into ``scratch``, pack that, and return the packed directory."""
    from moestro import models
    from moestro.checkpoints import open_checkpoint
    from moestro.memory.convert import convert
    from moestro.models.upcycle import DEMO_SOURCE, demo_source, upcycle

    mixture, packed = scratch / "mixture", scratch / "packed"
    source = open_checkpoint(demo_source())
    try:
        with byte_progress(f"copying the MLPs of {DEMO_SOURCE}") as progress:
            upcycle(source, models.describe(source), mixture, recipe, progress=progress)
    finally:
        source.close()
    checkpoint = open_checkpoint(mixture)
    try:
        specs = models.describe(checkpoint).weights
        with byte_progress("packing") as progress:
            convert(checkpoint, specs, packed, policy=policy, progress=progress)
    finally:
        checkpoint.close()
    return packed

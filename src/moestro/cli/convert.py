"""``moestro convert``: a checkpoint into a packed directory that loads as it lies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from moestro.cli._models import resolve_model
from moestro.cli._options import ModelArgument, RevisionOption
from moestro.cli._terminal import byte_progress, note
from moestro.core.units import format_bytes

if TYPE_CHECKING:
    from moestro.memory.convert import ConvertReport

#: between two lines about progress where there is no terminal
_LINES_SECONDS = 60.0


def convert(
    source: ModelArgument,
    out: Annotated[
        Path,
        typer.Argument(help="the directory to write; absent or empty", show_default=False),
    ],
    formats: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--format",
            "--formats",
            help="one format for all matrices, or per role, for example "
            "experts=FORMAT,attention=FORMAT; 'moestro doctor' lists the formats; default: float "
            "matrices to 4 bits in groups of 32, what is quantized stays as it is",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="at the end read all that was written and compare the checksums; also of a model "
            "that an earlier run has finished",
        ),
    ] = False,
    revision: RevisionOption = None,
) -> None:
    """Quantize a checkpoint into a packed directory; an interrupted run is taken up again."""
    from moestro import models
    from moestro.checkpoints import open_checkpoint
    from moestro.checkpoints.packed import PackedCheckpoint
    from moestro.memory.convert import convert as write_packed
    from moestro.memory.policy import FormatPolicy
    from moestro.text import load_tokenizer, save_tokenizer

    policy = None if formats is None else FormatPolicy.parse(formats)
    checkpoint = open_checkpoint(resolve_model(source), revision=revision)
    try:
        specs = models.describe(checkpoint).weights
        tokenizer = load_tokenizer(checkpoint)
        with byte_progress("converting", lines_every=_LINES_SECONDS) as progress:
            report = write_packed(
                checkpoint,
                specs,
                out.expanduser(),
                policy=policy,
                progress=progress,
                write_tokenizer=lambda folder: save_tokenizer(tokenizer, folder),
            )
    finally:
        checkpoint.close()
    show(report)
    if verify:
        packed = PackedCheckpoint.open(report.out_dir)
        with packed, byte_progress("verifying", lines_every=_LINES_SECONDS) as progress:
            packed.verify(progress)
        note("verified: every file is what was written")


def show(report: ConvertReport) -> None:
    """Bytes and the error of each format, the weights that lost most, and what to do next."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("format", "weights", "from", "to", "mean error", "largest error"):
        table.add_column(title, justify="left" if title == "format" else "right")
    for name in sorted({weight.format for weight in report.weights}):
        group = [weight for weight in report.weights if weight.format == name]
        errors = [weight.relative_error for weight in group]
        table.add_row(
            name,
            str(len(group)),
            format_bytes(sum(weight.source_nbytes for weight in group)),
            format_bytes(sum(weight.nbytes for weight in group)),
            f"{sum(errors) / len(errors):.2%}",
            f"{max(errors):.2%}",
        )
    Console(highlight=False, markup=False).print(table)
    worst = max(report.weights, key=lambda weight: weight.relative_error)
    if worst.relative_error > 0:
        note(f"largest error: {worst.key} ({worst.relative_error:.2%} of its norm)")
    resumed = f", {report.resumed} files from an earlier run" if report.resumed else ""
    note(
        f"wrote {format_bytes(report.nbytes)} from {format_bytes(report.source_nbytes)} to "
        f"{report.out_dir}{resumed}\nrun it with: moestro chat {report.out_dir}"
    )

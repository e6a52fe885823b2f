"""`curvescope reproduce`: a paper's figures, published next to measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from curvescope.cli import printing
from curvescope.cli.study_run import shown
from curvescope.papers import PAPERS
from curvescope.papers.reproduce import default_folder, redraw, reproduce

HEADER = ("claim", "published", "measured", "verdict")


def show(
    paper: str,
    figures: list[str],
    settings: dict[str, Any],
    *,
    out: Path | None,
    draw: bool,
    quiet: bool,
) -> None:
    """Compute or draw the figures, print what was claimed and what came out, and where the files are."""

    def say(line: str) -> None:
        typer.echo(line, err=True)

    if draw:
        found = redraw(paper, figures, out=out, say=say)
    else:
        with shown(quiet) as progress:
            found = reproduce(paper, figures, settings=settings, out=out, progress=progress, say=say)
    for name, result in found.items():
        typer.echo(f"{name}")
        printing.table(HEADER, [tuple(claim) for claim in result.claims()])
        typer.echo("")
    typer.echo(PAPERS[paper].citation)
    typer.echo(str((default_folder(paper) if out is None else out).resolve()))

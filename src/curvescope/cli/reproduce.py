"""`curvescope reproduce`: compare a paper's published numbers with measured ones."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import typer

from curvescope.cli import printing
from curvescope.cli.arguments.command_line import resume_hint
from curvescope.cli.arguments.settings_parsing import AUTO, choose_device, merge
from curvescope.cli.run_progress import progress_display
from curvescope.core.config import Settings
from curvescope.core.errors import UsageError
from curvescope.papers import PAPERS, check_settings, figures_of, find_figure
from curvescope.papers.all_claims import read, tally
from curvescope.papers.folder import ALL_CLAIMS
from curvescope.papers.reproduce import default_folder, redraw, reproduce

HEADER = ("claim", "published", "measured", "verdict", "published in", "whose")


def check_model(paper: str, figures: list[str], model: str | None, *, draw: bool) -> None:
    """Raise UsageError if a model is given for figures that have their own, or with --draw."""
    if model is None:
        return
    if draw:
        raise UsageError(f"--draw computes nothing, got the model {model!r} as well", hint="leave one out")
    kinds = {name: find_figure(paper, name).Config for name in figures or figures_of(paper)}
    takes = [name for name, kind in kinds.items() if any(field.name == "model" for field in fields(kind))]
    others = [name for name in kinds if name not in takes]
    if others:
        raise UsageError(
            f"expected figures that take a model, got {model!r} for {', '.join(others)} of {paper}, "
            "which have their own",
            hint=" ".join(f"--figure {name}" for name in takes) if takes else "leave the model out",
        )


def show_settings(paper: str, figures: list[str]) -> None:
    """Print every setting of the figures (by default all figures) with its default and meaning."""
    words = figures_of(paper, more=True)
    for name in figures or words:
        kind = find_figure(paper, name).Config
        typer.echo(f"{name}: {words[name]}\n")
        printing.settings(kind)
        typer.echo("")
    typer.echo(f"To change a setting: curvescope reproduce {paper} --set NAME=VALUE; a list is written 0,1")


def show(
    paper: str,
    figures: list[str],
    pairs: list[str],
    given: Settings,
    *,
    out: Path | None,
    draw: bool,
    quiet: bool,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Compute or draw the figures. Print published and measured values and the folder of the files."""

    def say(line: str) -> None:
        typer.echo(line, err=True)

    if draw:
        results = redraw(paper, figures, out=out, say=say)
    else:
        kinds = [find_figure(paper, name).Config for name in figures or figures_of(paper)]
        check_settings(paper, (pair.partition("=")[0].strip() for pair in pairs))
        settings = merge(kinds, None, pairs, given)
        with progress_display(quiet) as display:
            if settings.get("device") == AUTO:  # a paper's own device is the CPU
                settings = choose_device(settings, display.say)
            try:
                callbacks = {"progress": display.piece, "say": display.say, "force": force}
                results = reproduce(paper, figures, settings=settings, out=out, **callbacks)
            except KeyboardInterrupt:
                typer.echo(f"stopped; finished pieces are saved\n{resume_hint()}", err=True)
                raise typer.Exit(130) from None
    folder = default_folder(paper) if out is None else out
    if as_json:
        claims = {name: [claim._asdict() for claim in result.claims()] for name, result in results.items()}
        printing.as_json({"paper": paper, "folder": str(folder.resolve()), "figures": claims})
        return
    for name, result in results.items():
        typer.echo(f"{name}")
        printing.table(HEADER, [tuple(claim) for claim in result.claims()])
        typer.echo("")
    typer.echo(f"{tally(read(folder))}; all of them in {ALL_CLAIMS}.md and .csv")
    typer.echo(PAPERS[paper].citation)
    typer.echo(str(folder.resolve()))

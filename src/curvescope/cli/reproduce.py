"""`curvescope reproduce`: a paper's figures, published next to measured."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import typer

from curvescope.cli import printing
from curvescope.cli.run_progress import watched
from curvescope.cli.typed.line import go_on
from curvescope.cli.typed.settings_parsing import AUTO, choose_device, merge
from curvescope.core.config import Settings
from curvescope.core.errors import UsageError
from curvescope.papers import PAPERS, check_settings, figures_of, find_figure
from curvescope.papers.all_claims import read, tally
from curvescope.papers.folder import ALL_CLAIMS
from curvescope.papers.reproduce import default_folder, redraw, reproduce

HEADER = ("claim", "published", "measured", "verdict", "published in", "whose")


def check_model(paper: str, figures: list[str], model: str | None, *, draw: bool) -> None:
    """Raise where a model is given to figures that have their own, or that are only drawn."""
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
    """Print every setting of the figures, of all by default, with its default and meaning."""
    words = figures_of(paper, more=True)
    for name in figures or words:
        kind = find_figure(paper, name).Config
        typer.echo(f"{name}: {words[name]}\n")
        printing.settings(kind)
        typer.echo("")
    typer.echo(f"set one: curvescope reproduce {paper} --set NAME=VALUE; a list is written 0,1")


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
    """Compute or draw the figures, print what was claimed and what came out, and where the files are."""

    def say(line: str) -> None:
        typer.echo(line, err=True)

    if draw:
        found = redraw(paper, figures, out=out, say=say)
    else:
        kinds = [find_figure(paper, name).Config for name in figures or figures_of(paper)]
        check_settings(paper, (pair.partition("=")[0].strip() for pair in pairs))
        settings = merge(kinds, None, pairs, given)
        with watched(quiet) as watch:
            if settings.get("device") == AUTO:  # a paper's own device is the CPU
                settings = choose_device(settings, watch.say)
            try:
                how = {"progress": watch.piece, "say": watch.say, "force": force}
                found = reproduce(paper, figures, settings=settings, out=out, **how)
            except KeyboardInterrupt:
                typer.echo(f"stopped; what is finished is kept\n{go_on()}", err=True)
                raise typer.Exit(130) from None
    folder = default_folder(paper) if out is None else out
    if as_json:
        claims = {name: [claim._asdict() for claim in result.claims()] for name, result in found.items()}
        printing.as_json({"paper": paper, "folder": str(folder.resolve()), "figures": claims})
        return
    for name, result in found.items():
        typer.echo(f"{name}")
        printing.table(HEADER, [tuple(claim) for claim in result.claims()])
        typer.echo("")
    typer.echo(f"{tally(read(folder))}; all of them in {ALL_CLAIMS}.md and .csv")
    typer.echo(PAPERS[paper].citation)
    typer.echo(str(folder.resolve()))

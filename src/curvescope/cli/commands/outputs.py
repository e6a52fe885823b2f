"""Commands `report`, `runs`, `watch` and `reproduce`: show, list and remove results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from curvescope.cli.arguments import options
from curvescope.cli.arguments.options import (
    AsJson,
    Device,
    Force,
    Out,
    Profile,
    Quiet,
    Set,
    Settings,
    declares,
)
from curvescope.core.config import Value


@declares("data tokens tokenizer revision checkpoints dtype device seed")
def report(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|RUNS",
            help="A model as in `run`, or run folders and folders of them. Default: tiny-gpt.",
            autocompletion=options.complete_models,
        ),
    ] = None,
    profile: Profile = None,
    sections: Annotated[
        list[str] | None,
        typer.Option(
            "--sections",
            help="Sections or studies to show: spectra,heads; repeatable. Default: all of the profile.",
            autocompletion=options.complete_sections,
        ),
    ] = None,
    force: Force = False,
    page: Annotated[Path, typer.Option("--page", help="HTML file to write.")] = Path("report.html"),
    open: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    json: AsJson = False,
    out: Out = Path("runs"),
    quiet: Quiet = False,
    *,
    given: dict[str, Value],
) -> None:
    """Write one HTML page about a model or run folders.

    The page is one file that needs no network.

    Given a model, the command runs the studies that the sections need and reuses finished ones. After an
    interruption the same command resumes. Given run folders, it loads no model and leaves out unfinished
    runs. If a study fails, the page shows the others and the exit code is 1.

    Examples: curvescope report; curvescope report MODEL --data notes.txt --open; curvescope report tiny-gpt
    --sections spectra,heads; curvescope report runs; curvescope report runs/spectrum/* --page spectra.html
    """
    from curvescope.cli import page_run
    from curvescope.cli.arguments.settings_parsing import split

    page_options = page_run.PageOptions(page, out, profile, split(sections), force, quiet, json, open)
    page_run.show(what or [], given, page_options)


def runs(
    out: Out = Path("runs"),
    remove: Annotated[
        list[Path] | None, typer.Option("--remove", help="Remove this run folder; repeatable.")
    ] = None,
    others: Annotated[
        list[Path] | None, typer.Argument(help="More folders to remove, after --remove.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    json: AsJson = False,
) -> None:
    """List run folders.

    Each line shows study, model, data, settings, date, size, and whether the run is finished.

    Examples: curvescope runs; curvescope runs --remove runs/spectrum/20260101-120000-0123abcd
    """
    from curvescope.cli import page_run
    from curvescope.core.errors import UsageError

    if others and not remove:
        raise UsageError(
            f"expected --remove before {others[0]}", hint=f"curvescope runs --remove {others[0]}"
        )
    if remove:
        page_run.ask_and_remove([*remove, *(others or [])], sure=yes)
    else:
        page_run.show_runs(out, as_json=json)


def watch(
    run: Annotated[Path, typer.Argument(help="Output folder (out=) of a cs.CurvatureMonitor.")],
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
    json: AsJson = False,
) -> None:
    """Watch the curvature of a training run.

    Shows λ_max, η·λ_max against its threshold, and the sharp blocks.

    On a terminal the view updates until the run is finished or you press Ctrl-C. In a pipe every measurement
    is one line. --json prints the last row as an object.

    Examples: curvescope watch runs/mine; curvescope watch runs/mine --once; curvescope watch runs/mine > log
    """
    from curvescope.cli import watch as watch_run

    watch_run.show(run, once=once, as_json=json)


def reproduce(
    paper: Annotated[
        str,
        typer.Argument(
            help="Name of a paper: see `curvescope list`.", autocompletion=options.complete_papers
        ),
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model as in `run`, for papers that take any model.",
            autocompletion=options.complete_models,
        ),
    ] = None,
    figure: Annotated[
        list[str] | None, typer.Option("--figure", help="Figure to reproduce; repeatable. Default: all.")
    ] = None,
    profile: Profile = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Use the paper's own random numbers if they are available.")
    ] = False,
    experiment: Annotated[
        list[str] | None,
        typer.Option("--experiment", help="Select experiments of a figure by a glob; repeatable."),
    ] = None,
    device: Device = None,
    set: Set = None,
    settings: Settings = False,
    draw: Annotated[
        bool, typer.Option("--draw", help="Draw stored results again without computing.")
    ] = False,
    force: Force = False,
    json: AsJson = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Output folder. Default: reproductions/PAPER.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Reproduce the figures of a paper.

    Writes pictures, tables and arrays, with published numbers next to measured ones.

    After an interruption the same command resumes, and finished figures are read from disk.
    `curvescope reproduce PAPER --settings` lists the settings.

    Examples: curvescope reproduce ormaniec2025 --figure heatmap; curvescope reproduce ormaniec2025 --draw;
    curvescope reproduce molina2023 tiny-gpt
    """
    from curvescope.cli import reproduce as command

    if settings:
        command.show_settings(paper, figure or [])
        return
    command.check_model(paper, figure or [], model, draw=draw)

    given: dict[str, Value] = {
        "profile": profile,
        "replay": replay or None,
        "device": device,
        "experiments": experiment,
        "model": model,
    }
    command.show(
        paper, figure or [], set or [], given, out=out, draw=draw, quiet=quiet, force=force, as_json=json
    )

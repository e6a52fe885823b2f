"""Commands about runs that are there, or will be: the page, the list, a training run that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from curvescope.cli.typed import options
from curvescope.cli.typed.options import (
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
            help="A model as in `run`, which is looked at first; or run folders, or folders of them, which "
            "are shown as they are. Default: tiny-gpt.",
            autocompletion=options.models,
        ),
    ] = None,
    profile: Profile = None,
    sections: Annotated[
        list[str] | None,
        typer.Option(
            "--sections",
            help="Sections of the page or studies: spectra,heads; repeatable. Default: all of the profile.",
            autocompletion=options.sections,
        ),
    ] = None,
    force: Force = False,
    page: Annotated[Path, typer.Option("--page", help="The HTML file to write.")] = Path("report.html"),
    open: Annotated[bool, typer.Option("--open", help="Show the page in a browser.")] = False,
    json: AsJson = False,
    out: Out = Path("runs"),
    quiet: Quiet = False,
    *,
    given: dict[str, Value],
) -> None:
    """Write one HTML page about a model or run folders.

    The page is one file that needs no network.

    Of a model it runs the studies that the sections need, and takes those that are finished as they are; what
    was stopped goes on with the same command. From run folders it loads no model, and a run that is not
    finished is left out. Where a study fails the page has the others, and the exit code is 1.

    Examples: curvescope report; curvescope report MODEL --data notes.txt --open; curvescope report tiny-gpt
    --sections spectra,heads; curvescope report runs; curvescope report runs/spectrum/* --page spectra.html
    """
    from curvescope.cli import page_run
    from curvescope.cli.typed.settings_parsing import split

    wish = page_run.Wish(page, out, profile, split(sections), force, quiet, json, open)
    page_run.show(what or [], given, wish)


def runs(
    out: Out = Path("runs"),
    remove: Annotated[
        list[Path] | None, typer.Option("--remove", help="Remove this run folder; repeatable.")
    ] = None,
    others: Annotated[list[Path] | None, typer.Argument(help="With --remove: further folders.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before removing.")] = False,
    json: AsJson = False,
) -> None:
    """List run folders.

    Each line has study, model, data, settings, date, size, and if the run is finished.

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
    run: Annotated[Path, typer.Argument(help="Folder of a cs.CurvatureMonitor: its out=.")],
    once: Annotated[bool, typer.Option("--once", help="Print what is there and end.")] = False,
    json: AsJson = False,
) -> None:
    """Watch the curvature of a training run.

    Shows λ_max, η·λ_max against its threshold, and the sharp blocks.

    On a terminal it is shown live until the run is finished, and Ctrl-C leaves; in a pipe every measurement
    is a line. With --json the last row is printed as an object.

    Examples: curvescope watch runs/mine; curvescope watch runs/mine --once; curvescope watch runs/mine > log
    """
    from curvescope.cli import watch as watch_run

    watch_run.show(run, once=once, as_json=json)


def reproduce(
    paper: Annotated[
        str, typer.Argument(help="Name of a paper: see `curvescope list`.", autocompletion=options.papers)
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            help="For a paper that is measured on any model: the same as in `run`.",
            autocompletion=options.models,
        ),
    ] = None,
    figure: Annotated[
        list[str] | None, typer.Option("--figure", help="One of its figures; repeatable. All by default.")
    ] = None,
    profile: Profile = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="The paper's own random numbers, where they can be had.")
    ] = False,
    experiment: Annotated[
        list[str] | None,
        typer.Option("--experiment", help="Glob over the experiments of a figure; repeatable."),
    ] = None,
    device: Device = None,
    set: Set = None,
    settings: Settings = False,
    draw: Annotated[bool, typer.Option("--draw", help="Draw stored results again; compute nothing.")] = False,
    force: Force = False,
    json: AsJson = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the files; default reproductions/PAPER.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Reproduce the figures of a paper.

    Writes pictures, tables and arrays, with published numbers next to measured ones.

    A run that was stopped goes on where it was when the same command is given again, and figures that are
    finished are read. `curvescope reproduce PAPER --settings` lists what can be set.

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
    how = {"out": out, "draw": draw, "quiet": quiet, "force": force, "as_json": json}
    command.show(paper, figure or [], set or [], given, **how)

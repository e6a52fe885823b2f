"""The command that measures published figures again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from curvescope.cli.typed import completion
from curvescope.cli.typed.options import AsJson, Device, Force, Profile, Quiet, Set, Settings
from curvescope.core.config import Value


def reproduce(
    paper: Annotated[
        str, typer.Argument(help="Name of a paper: see `curvescope list`.", autocompletion=completion.papers)
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            help="For a paper that is measured on any model: the same as in `run`.",
            autocompletion=completion.models,
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
    """Measure a paper's figures again: pictures, tables and arrays, published next to measured.

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

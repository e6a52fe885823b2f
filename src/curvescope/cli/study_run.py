"""`curvescope run`: one study."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from curvescope.cli import printing
from curvescope.cli.commands.ranks import shared_out, speaks
from curvescope.cli.run_progress import Watch, watched
from curvescope.cli.typed.line import go_on
from curvescope.cli.typed.settings_parsing import check_options, choose_device, merge, names_of, spoken
from curvescope.core.config import Settings
from curvescope.runs.folder import RunStopped, SavedProgress
from curvescope.runs.verification import checks

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.runs.study_result import Shown


class Wish(NamedTuple):
    """Options of a run besides its settings."""

    out: Path = Path("runs")
    quiet: bool = False  # no progress, no words on what is done
    alone: bool = False  # the folder and nothing else
    force: bool = False
    tables: bool = False
    as_json: bool = False
    profile: str | None = None
    budget: str | None = None
    parallel: str = "auto"  # what several ranks divide


def show(study: str, config: Path | None, pairs: list[str], given: Settings, wish: Wish) -> None:
    """Run a study, or find it finished, and print its headline numbers and where it is."""
    path, result = carry_out(study, config, pairs, given, wish)
    if wish.as_json:
        printing.as_json(_as_dict(path, result))
    elif wish.alone:
        typer.echo(str(path))
    else:
        _print(path, result, tables=wish.tables)


def show_settings(study: str) -> None:
    """Print every setting of a study with its default and meaning."""
    from curvescope.studies import STUDIES, find

    kind = find(study).Config
    typer.echo(f"{study}: {STUDIES[study]}\n")
    printing.settings(kind)
    typer.echo(f"\nset one: curvescope run {study} --set NAME=VALUE; a list is written 0,1")


def carry_out(
    study: str, config: Path | None, pairs: list[str], given: Settings, wish: Wish
) -> tuple[Path, Shown]:
    """Run a study, or find it finished: its folder and its result."""
    begun = time.monotonic()  # of a budget: libraries are not loaded yet
    from curvescope.studies import find, run_study

    kind = find(study).Config
    with spoken(study, kind), shared_out(wish.parallel), watched(wish.quiet or not speaks()) as watch:
        check_options(study, kind, given)
        settings = merge([kind], config, pairs, given)
        if "device" in names_of(kind):
            settings = choose_device(settings, watch.say)
        limit = run_study.Limit(wish.profile, wish.budget, begun=begun)
        try:
            return run_study.run(
                study,
                settings,
                out=wish.out,
                force=wish.force,
                limit=limit,
                progress=watch.piece,
                say=watch.say,
                tell=watch.answer,
            )
        except KeyboardInterrupt as stop:
            raise say_how_to_go_on(watch, stop) from None


def say_how_to_go_on(watch: Watch, stop: KeyboardInterrupt) -> typer.Exit:
    """Print what is kept of a run that was stopped and the command that goes on; the exit to raise."""
    kept = stop.standing if isinstance(stop, RunStopped) else SavedProgress(0, 0, 0)
    typer.echo(f"{watch.stopped(kept)}\n{go_on()}", err=True)
    return typer.Exit(130)


def _print(path: Path, result: Shown, *, tables: bool) -> None:
    """The cards of the page, the tables if they are wanted, what was chosen, and the folder."""
    if tables:
        for name, frame in result.tables().items():
            typer.echo(f"{name}")
            numbers = [i for i, kind in enumerate(frame.dtypes) if kind.kind in "fi"]
            printing.table(list(frame.columns), _rows(frame), right=numbers)
            typer.echo("")
    summary = result.summary()
    printing.lines([(label, value, words) for label, value, words in summary if label != "note"])
    said = [words for label, _, words in summary if label == "note"]
    for note in dict.fromkeys([*said, *result.notes]):
        typer.echo(f"note: {note}")
    if smaller := _config(path)[1]:
        words = ", ".join(f"{name}={value}" for name, value in smaller.items())
        typer.echo(
            f"note: chosen to be in time: {words}; --profile full for the study's own, --budget for more"
        )
    if checked := checks.describe_errors(checks.read_verifications(path)):
        typer.echo(f"checked: {checked}")
    typer.echo(f"\n{path}")


def _as_dict(path: Path, result: Shown) -> dict[str, object]:
    config, chosen = _config(path)
    summary = [line for line in result.summary() if line[0] != "note"]
    return {
        "study": config.pop("study"),
        "folder": str(path),
        "version": config.pop("version"),
        "settings": config,
        "chosen": chosen,
        "summary": [{"label": label, "value": value, "words": words} for label, value, words in summary],
        "notes": result.notes,
        "verification": checks.read_verifications(path),
        "tables": {
            name: [dict(zip(map(str, frame.columns), row, strict=True)) for row in _rows(frame)]
            for name, frame in result.tables().items()
        },
    }


def _config(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a run, and those of them that were chosen to be in time."""
    from curvescope.studies import run_study

    return run_study.read_config(path), run_study.chosen(path)


def _rows(frame: pd.DataFrame) -> list[list[object]]:
    return frame.to_numpy(dtype=object).tolist()

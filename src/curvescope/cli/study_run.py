"""`curvescope run` and `curvescope report`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from curvescope.cli import printing
from curvescope.cli.asking import check_options, merge, spoken
from curvescope.cli.watching import watched
from curvescope.core.config import Settings
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.runs.folder import CONFIG, Standing, Stopped

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.runs.folder import Say
    from curvescope.runs.listing import RunInfo
    from curvescope.runs.shown import Shown


class Wish(NamedTuple):
    """What a person wants of a run besides its settings."""

    out: Path = Path("runs")
    quiet: bool = False  # no progress, no words on what is done
    alone: bool = False  # the folder and nothing else
    force: bool = False
    tables: bool = False
    as_json: bool = False
    profile: str | None = None
    budget: str | None = None


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


def report(runs: list[Path], *, page: Path, out: Path, quiet: bool) -> None:
    """Write the page from run folders, or from a run of `spectrum` on the bundled model."""
    from curvescope.report import write_page
    from curvescope.report.choice import choose

    if page.is_dir() or not page.parent.is_dir():
        raise UsageError(f"expected a file in an existing folder for the page, got {page}")
    folders, unfinished = choose(runs or [carry_out("spectrum", None, [], {}, Wish(out, quiet))[0]])
    if not folders:
        raise CurvescopeError(
            f"expected a finished run for the page, got {unfinished[0].path}, which is not finished",
            hint=_finishing(unfinished[0]),
        )
    for run in unfinished:
        typer.echo(f"left out: {run.path} is not finished; to finish it: {_finishing(run)}", err=True)
    there = page.exists()
    write_page(folders, page)
    if there:
        typer.echo(f"{page} was there and is written anew", err=True)
    typer.echo(f"the report is in {page.resolve()}")


def _finishing(run: RunInfo) -> str:
    """The command that goes on with a run that is not finished; a monitor's goes on with its loop."""
    if run.study == "monitor":
        return f"start its training loop again, with out={str(run.path)!r}"
    root = run.path.parent.parent
    return shlex.join(
        ["curvescope", "run", run.study, "--config", str(run.path / CONFIG), "--out", str(root)]
    )


def carry_out(
    study: str, config: Path | None, pairs: list[str], given: Settings, wish: Wish
) -> tuple[Path, Shown]:
    """Run a study, or find it finished: its folder and its result."""
    from curvescope.studies import find, folder

    kind = find(study).Config
    with spoken(study, kind), watched(wish.quiet) as watch:
        check_options(study, kind, given)
        settings = merge([kind], config, pairs, given)
        limit = folder.Limit(wish.profile, wish.budget)
        try:
            return folder.run(
                study,
                settings,
                out=wish.out,
                force=wish.force,
                limit=limit,
                progress=watch.piece,
                say=_say(wish.quiet),
            )
        except KeyboardInterrupt as stop:
            kept = stop.standing if isinstance(stop, Stopped) else Standing(0, 0, 0)
            typer.echo(watch.stopped(kept), err=True)
            raise typer.Exit(130) from None


def _say(quiet: bool) -> Say:
    def say(line: str) -> None:
        if not quiet:
            typer.echo(line, err=True)

    return say


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
        "tables": {
            name: [dict(zip(map(str, frame.columns), row, strict=True)) for row in _rows(frame)]
            for name, frame in result.tables().items()
        },
    }


def _config(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a run, and those of them that were chosen to be in time."""
    from curvescope.studies import folder

    return folder.read_config(path), folder.chosen(path)


def _rows(frame: pd.DataFrame) -> list[list[object]]:
    return frame.to_numpy(dtype=object).tolist()

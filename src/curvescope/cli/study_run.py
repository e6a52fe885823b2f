"""`curvescope run`: one study."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from curvescope.cli import printing
from curvescope.cli.arguments.command_line import resume_hint
from curvescope.cli.arguments.settings_parsing import (
    check_options,
    choose_device,
    merge,
    names_of,
    with_option_hints,
)
from curvescope.cli.multi_rank import divided_over_ranks, prints_output
from curvescope.cli.run_progress import ProgressDisplay, progress_display
from curvescope.core.config import Settings
from curvescope.runs.folder import RunStopped, SavedProgress
from curvescope.runs.verification import checks

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.runs.study_result import Shown


class RunOptions(NamedTuple):
    """Options of a run besides its settings."""

    out: Path = Path("runs")
    quiet: bool = False  # no progress messages
    print_only_folder: bool = False
    force: bool = False
    tables: bool = False
    as_json: bool = False
    profile: str | None = None
    budget: str | None = None
    parallel: str = "auto"  # what to divide over several ranks


def show(study: str, config: Path | None, pairs: list[str], given: Settings, options: RunOptions) -> None:
    """Run a study, or load it if it is finished, and print its headline numbers and its folder."""
    path, result = run_or_load(study, config, pairs, given, options)
    if options.as_json:
        printing.as_json(_as_dict(path, result))
    elif options.print_only_folder:
        typer.echo(str(path))
    else:
        _print(path, result, tables=options.tables)


def show_settings(study: str) -> None:
    """Print every setting of a study with its default and meaning."""
    from curvescope.studies import STUDIES, find

    kind = find(study).Config
    typer.echo(f"{study}: {STUDIES[study]}\n")
    printing.settings(kind)
    typer.echo(f"\nTo change a setting: curvescope run {study} --set NAME=VALUE; a list is written 0,1")


def run_or_load(
    study: str, config: Path | None, pairs: list[str], given: Settings, options: RunOptions
) -> tuple[Path, Shown]:
    """Run a study, or load it if it is finished. Return its folder and its result."""
    start_time = time.monotonic()  # the budget includes the time to import the libraries
    from curvescope.studies import find, run_study

    kind = find(study).Config
    with (
        with_option_hints(study, kind),
        divided_over_ranks(options.parallel),
        progress_display(options.quiet or not prints_output()) as display,
    ):
        check_options(study, kind, given)
        settings = merge([kind], config, pairs, given)
        if "device" in names_of(kind):
            settings = choose_device(settings, display.say)
        limit = run_study.Limit(options.profile, options.budget, begun=start_time)
        try:
            return run_study.run(
                study,
                settings,
                out=options.out,
                force=options.force,
                limit=limit,
                progress=display.piece,
                say=display.say,
                tell=display.answer,
            )
        except KeyboardInterrupt as stop:
            raise exit_after_interrupt(display, stop) from None


def exit_after_interrupt(display: ProgressDisplay, stop: KeyboardInterrupt) -> typer.Exit:
    """Print the progress that was saved and the command that resumes. Return the exit to raise."""
    saved = stop.standing if isinstance(stop, RunStopped) else SavedProgress(0, 0, 0)
    typer.echo(f"{display.saved_progress(saved)}\n{resume_hint()}", err=True)
    return typer.Exit(130)


def _print(path: Path, result: Shown, *, tables: bool) -> None:
    """Print the headline numbers, the tables on request, the settings that were chosen, and the folder."""
    if tables:
        for name, frame in result.tables().items():
            typer.echo(f"{name}")
            numbers = [i for i, kind in enumerate(frame.dtypes) if kind.kind in "fi"]
            printing.table(list(frame.columns), _rows(frame), right=numbers)
            typer.echo("")
    summary = result.summary()
    printing.lines([(label, value, words) for label, value, words in summary if label != "note"])
    notes = [words for label, _, words in summary if label == "note"]
    for note in dict.fromkeys([*notes, *result.notes]):
        typer.echo(f"note: {note}")
    if smaller := _config(path)[1]:
        words = ", ".join(f"{name}={value}" for name, value in smaller.items())
        typer.echo(f"note: chosen to save time: {words}; --profile full takes the study's own settings")
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
    """Return the settings of a run, and those of them that were chosen to meet the time limit."""
    from curvescope.studies import run_study

    return run_study.read_config(path), run_study.chosen(path)


def _rows(frame: pd.DataFrame) -> list[list[object]]:
    return frame.to_numpy(dtype=object).tolist()

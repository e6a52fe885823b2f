"""`curvescope runs`: what is there, and removing it."""

from __future__ import annotations

from pathlib import Path

import typer

from curvescope.cli import printing
from curvescope.core.config import Config
from curvescope.core.errors import UsageError
from curvescope.core.numbers import data_size
from curvescope.runs.listing import RunInfo, list_runs, read_run, remove_runs
from curvescope.studies import STUDIES, find

WIDTH = 60  # of the settings in short
NONE = "–"


def show(out: Path, *, as_json: bool) -> None:
    """Print every run folder: study, model, data, settings that are not the study's own, date, size."""
    runs = [*list_runs(out, depth=1), *list_runs(out)]  # those that were watched, and those of studies
    if as_json:
        printing.as_json([_as_dict(run) for run in runs])
        return
    if not runs:
        typer.echo(f"no runs in {out}", err=True)
        return
    rows = [
        [
            str(run.path),
            run.model or NONE,
            run.data or NONE,
            f"{run.begun:%Y-%m-%d %H:%M}",
            data_size(run.size),
            "yes" if run.finished else "no",
            _short(run),
        ]
        for run in runs
    ]
    header = ["folder", "model", "data", "begun", "size", "finished", "settings"]
    printing.table(header, rows, right=(4,))


def remove(paths: list[Path], *, sure: bool) -> None:
    """Remove run folders, after a question unless `sure`."""
    runs = [read_run(path) for path in paths]
    for run in runs:
        state = "" if run.finished else ", not finished"
        typer.echo(f"{run.path}: {run.study} of {run.model or NONE}, {data_size(run.size)}{state}", err=True)
    if not sure and not typer.confirm(
        f"remove {len(runs)} run folder{'s' if len(runs) > 1 else ''}?", err=True
    ):
        raise UsageError("nothing was removed")
    remove_runs(paths)
    typer.echo(f"removed {len(runs)}", err=True)


def _short(run: RunInfo) -> str:
    """What differs from the study's own settings."""
    own = (find(run.study).Config if run.study in STUDIES else Config)().to_dict()
    other = [f"{k}={printing.setting(v)}" for k, v in run.settings.items() if own.get(k) != v]
    text = " ".join(other)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def _as_dict(run: RunInfo) -> dict[str, object]:
    return {
        "folder": str(run.path),
        "study": run.study,
        "model": run.model,
        "data": run.data,
        "settings": dict(run.settings),
        "begun": run.begun.isoformat(timespec="seconds"),
        "bytes": run.size,
        "finished": run.finished,
    }

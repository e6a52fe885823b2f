"""Select the runs of a page: finished ones among the named folders, or inside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from curvescope.core.errors import UsageError
from curvescope.runs.folder import CONFIG
from curvescope.runs.listing import RunInfo, list_runs, read_run


class Choice(NamedTuple):
    """Folders that make a page, and runs that are left out because they are not finished."""

    folders: list[Path]
    unfinished: list[RunInfo]


def choose(paths: Sequence[Path]) -> Choice:
    """Runs of every path: itself, or those under it if it is a folder of runs.

    Folders that are not runs of a study (a reproduction, a mistake) are included: the page shows or
    refuses them.
    """
    folders, unfinished = [], []
    for path in (one for asked in paths for one in _under(asked)):
        try:
            run = read_run(path)
        except UsageError:
            run = None
        if run is None or run.finished:
            folders.append(path)
        else:
            unfinished.append(run)
    return Choice(folders, unfinished)


def _under(path: Path) -> list[Path]:
    """The runs in the folder of a study, or in those of all studies, the oldest first; else the path."""
    if (path / CONFIG).exists():
        return [path]
    return [run.path for run in (*list_runs(path, depth=1), *list_runs(path))] or [path]

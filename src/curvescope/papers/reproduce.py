"""Run the figures of a paper into a folder, or draw again what is stored there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from curvescope.core.config import Config, Settings
from curvescope.core.errors import CurvescopeError, UsageError, near_misses
from curvescope.core.progress import Progress
from curvescope.papers import all_claims, check_settings, figures_of, find_figure
from curvescope.papers.folder import FigureFolder, check_folder, load_result, publish, read_settings
from curvescope.runs.disk.durable import full_disk_said
from curvescope.runs.folder import STATE, AlreadyFinished, Say
from curvescope.runs.shown import Shown

EVERYWHERE = ("profile", "replay", "device")  # what a figure that has no use for it is not told


def reproduce(
    paper: str,
    figures: Sequence[str] = (),
    *,
    settings: Settings | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    say: Say = lambda line: None,
    force: bool = False,
) -> dict[str, Shown]:
    """Compute the named figures, or all of a paper, and write them into `out`, with one table of all claims.

    A figure that was begun with the same settings, model and data goes on where it was, and one that is
    finished is read.

    Args:
        settings: of the figures' `Config`s; each figure is told what it knows.
        out: `reproductions/PAPER` unless given.
        say: called with lines for a person, such as that a figure is resumed.
        force: compute anew what is finished.

    Returns:
        The result of every figure.
    """
    names = _names(paper, figures)
    configs = _configs(paper, names, settings or {})
    folder = default_folder(paper) if out is None else Path(out)
    check_folder(folder, paper)
    found = {}
    for name, cfg in configs.items():
        place = FigureFolder(folder, paper, name, cfg, say=say, force=force)
        with full_disk_said(lambda name=name: f"what is done of {name} is kept under {folder / STATE}"):
            try:
                start = time.monotonic()
                result = find_figure(paper, name).run(cfg, progress=_prefixed(progress, name), state=place)
                place.finish(result, seconds=time.monotonic() - start, say=say)
            except AlreadyFinished:
                say(f"{name}: already finished")
                result = load_result(folder, name)
        found[name] = result
    all_claims.write(folder, found, say=say)
    return found


def redraw(
    paper: str,
    figures: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    say: Say = lambda line: None,
) -> dict[str, Shown]:
    """Draw the named figures, or all that are stored in `out`, again; nothing is computed."""
    folder = default_folder(paper) if out is None else Path(out)
    figures_of(paper)
    meta = read_settings(folder)
    names = _names(paper, figures) if figures else list(meta["figures"])
    if meta["paper"] != paper or not names:
        raise CurvescopeError(f"expected stored results of {paper} in {folder}, found none")
    found = {}
    for name in names:
        found[name] = load_result(folder, name)
        entry = {key: value for key, value in meta["figures"][name].items() if key != "files"}
        publish(folder, paper, name, found[name], entry, folder / STATE / f"{name}-drawing", say)
        if not any((folder / STATE).iterdir()):
            (folder / STATE).rmdir()
    all_claims.write(folder, found, say=say)
    return found


def default_folder(paper: str) -> Path:
    """Where a reproduction goes unless it is told."""
    return Path("reproductions") / paper


def _names(paper: str, figures: Sequence[str]) -> list[str]:
    for name in figures:
        find_figure(paper, name)
    return list(dict.fromkeys(figures)) or list(figures_of(paper))


def _configs(paper: str, names: Sequence[str], settings: Settings) -> dict[str, Config]:
    """A configuration for each figure; a setting that none of them knows is an error, before any work."""
    check_settings(paper, settings)
    kinds = {name: find_figure(paper, name).Config for name in names}
    known = {name: [field.name for field in fields(kind)] for name, kind in kinds.items()}
    everything = sorted({option for options in known.values() for option in options})
    for option in settings:
        if option not in everything and option not in EVERYWHERE:
            raise UsageError(
                f"no figure among {', '.join(names)} has the setting {option!r}",
                hint=near_misses(option, everything),
            )
    return {
        name: kind.from_dict({key: value for key, value in settings.items() if key in known[name]})
        for name, kind in kinds.items()
    }


def _prefixed(progress: Progress | None, name: str) -> Progress | None:
    if progress is None:
        return None
    return lambda what, done, total: progress(f"{name}: {what}", done, total)

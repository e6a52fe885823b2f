"""Compute the figures of a paper into a folder, or draw stored figures again."""

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
from curvescope.runs.disk.atomic_files import explain_full_disk
from curvescope.runs.folder import STATE, AlreadyFinished, Say
from curvescope.runs.study_result import Shown

EVERYWHERE = ("profile", "replay", "device")  # settings that are skipped for figures that do not have them


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
    """Compute the named figures, or all of a paper, and write them into `out` with one table of all claims.

    An unfinished figure with the same settings, model and data is resumed. A finished one
    is read from the folder.

    Args:
        settings: settings of the figures; each figure takes those it has.
        out: folder; by default `reproductions/PAPER`.
        say: called with messages, for instance if a figure is resumed.
        force: compute finished figures again.

    Returns:
        The result of every figure.
    """
    names = _names(paper, figures)
    configs = _configs(paper, names, settings or {})
    folder = default_folder(paper) if out is None else Path(out)
    check_folder(folder, paper)
    results = {}
    for name, cfg in configs.items():
        place = FigureFolder(folder, paper, name, cfg, say=say, force=force)
        with explain_full_disk(
            lambda name=name: f"finished pieces of {name} are stored under {folder / STATE}"
        ):
            try:
                start = time.monotonic()
                result = find_figure(paper, name).run(cfg, progress=_prefixed(progress, name), state=place)
                place.finish(result, seconds=time.monotonic() - start, say=say)
            except AlreadyFinished:
                say(f"{name}: already finished")
                result = load_result(folder, name)
        results[name] = result
    all_claims.write(folder, results, say=say)
    return results


def redraw(
    paper: str,
    figures: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    say: Say = lambda line: None,
) -> dict[str, Shown]:
    """Draw the named figures, or all that are stored in `out`, again, without computing anything."""
    folder = default_folder(paper) if out is None else Path(out)
    figures_of(paper)
    meta = read_settings(folder)
    names = _names(paper, figures) if figures else list(meta["figures"])
    if meta["paper"] != paper or not names:
        raise CurvescopeError(f"expected stored results of {paper} in {folder}, results none")
    results = {}
    for name in names:
        results[name] = load_result(folder, name)
        entry = {key: value for key, value in meta["figures"][name].items() if key != "files"}
        publish(folder, paper, name, results[name], entry, folder / STATE / f"{name}-drawing", say)
        if not any((folder / STATE).iterdir()):
            (folder / STATE).rmdir()
    all_claims.write(folder, results, say=say)
    return results


def default_folder(paper: str) -> Path:
    """Return the default folder of a reproduction."""
    return Path("reproductions") / paper


def _names(paper: str, figures: Sequence[str]) -> list[str]:
    for name in figures:
        find_figure(paper, name)
    return list(dict.fromkeys(figures)) or list(figures_of(paper))


def _configs(paper: str, names: Sequence[str], settings: Settings) -> dict[str, Config]:
    """Return a configuration for each figure; raise an error if no figure has a given setting."""
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

"""`curvescope report`: a page from run folders, or from what a model needs for one."""

from __future__ import annotations

import shlex
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import typer

from curvescope.cli import printing
from curvescope.cli.run_progress import watched
from curvescope.cli.study_run import say_how_to_go_on
from curvescope.cli.typed.line import wants_traceback
from curvescope.cli.typed.settings_parsing import choose_device
from curvescope.core.config import Config, Settings
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.number_format import data_size, duration
from curvescope.models.zoo import BUNDLED
from curvescope.report import write_page
from curvescope.report.papers import is_reproduction
from curvescope.report.run_selection import choose as choose_runs
from curvescope.report.study_selection import AROUND, FULL, choose
from curvescope.runs.disk.atomic_files import check_writable
from curvescope.runs.folder import CONFIG
from curvescope.runs.listing import RunInfo, list_runs, read_run, remove_runs
from curvescope.runs.pieces import RESULT
from curvescope.studies import STUDIES, find
from curvescope.studies.batch_run import Made, Wanted, run_all

MODELS = ("config.json", "adapter_config.json", "ckpt.pt", "model.safetensors")
"""A folder that has one of these holds a model."""
PROFILES = ("quick", "full")


class Wish(NamedTuple):
    """Options of a page besides the settings of its studies."""

    page: Path
    out: Path
    profile: str | None
    sections: list[str]
    force: bool
    quiet: bool
    as_json: bool
    open: bool


def show(what: Sequence[str], given: Settings, wish: Wish) -> None:
    """Write the page, say where it is, and what is not in it; the exit code is 1 where a study failed."""
    if wish.page.is_dir() or not wish.page.parent.is_dir():
        raise UsageError(f"expected a file in an existing folder for the page, got {wish.page}")
    check_writable(wish.page.parent)
    made = Made({}, {})
    if what and not _is_model(what):
        _check_unused(given, wish)
        folders = _finished([Path(path) for path in what])
    else:
        made = _run(what[0] if what else "tiny-gpt", given, wish)
        folders = list(made.folders.values())
    _write(folders, made, wish)
    if made.failed:
        raise typer.Exit(1)


def _is_model(what: Sequence[str]) -> bool:
    """Return True if a model is named, and not run folders."""
    models = [name for name in what if _names_model(name)]
    if models and len(what) > 1:
        raise UsageError(
            f"expected one model, or run folders, got {models[0]!r} among {len(what)}",
            hint="curvescope compare takes several models",
        )
    return bool(models)


def _names_model(name: str) -> bool:
    """A bundled name, a file, a folder with a model in it, or a hub id, which is no path to anything here."""
    path = Path(name)
    if name in BUNDLED or path.is_file():
        return True
    if path.is_dir():
        return any((path / file).exists() for file in MODELS)
    return len(path.parts) == 1 or not path.parent.exists()


def _is_run(path: Path) -> bool:
    """Return True if a folder holds a run, or the reproduction of a paper."""
    return (path / CONFIG).exists() or is_reproduction(path)


def _check_unused(given: Settings, wish: Wish) -> None:
    """Raise where settings are given for runs that are there."""
    words = [name for name, value in given.items() if value not in (None, [])]
    words += [name for name in ("profile", "sections", "force") if getattr(wish, name)]
    if words:
        raise UsageError(
            f"expected a model with --{words[0]}, got run folders, which are shown as they are",
            hint=f"leave --{words[0]} out, or name a model",
        )


def _run(model: str, given: Settings, wish: Wish) -> Made:
    """Run what the sections need."""
    from curvescope.studies.batch_run import unsuited

    profile = wish.profile or "quick"
    if profile not in PROFILES:
        raise UsageError(f"expected the profile quick or full, got {profile!r}")
    given = {**given, "model": model}
    wanted = choose(wish.sections, profile)
    with watched(wish.quiet) as watch:
        given = choose_device(given, watch.say)
        left_out = unsuited([one.study for one in wanted], given)
        for study, reason in left_out.items():
            watch.say(f"left out: {study}: {reason}")
        wanted = [one for one in wanted if one.study not in left_out]
        if not wanted:
            raise UsageError(f"nothing is left to show of {model}: {next(iter(left_out.values()))}")
        for line in _plan(model, wanted, profile):
            watch.say(line)

        def begin(number: int, one: Wanted) -> None:
            done = sum(other.seconds for other in wanted[: number - 1])
            words = f"{number} of {len(wanted)}: {one.study}, {one.why}"
            watch.part(words, done, done + one.seconds, sum(other.seconds for other in wanted))

        def fail(one: Wanted, error: Exception) -> None:
            watch.fail(f"{one.study} failed: {_sentence(error)}")

        try:
            return run_all(
                wanted, given, out=wish.out, profile=profile, force=wish.force, strict=wants_traceback(),
                begin=begin, fail=fail, progress=watch.piece, say=watch.say, tell=watch.answer,
            )  # fmt: skip
        except KeyboardInterrupt as stop:
            raise say_how_to_go_on(watch, stop) from None


def _plan(model: str, wanted: Sequence[Wanted], profile: str) -> list[str]:
    """Describe the studies that will run, the reason for each, and the expected time."""
    total = sum(one.seconds for one in wanted) + AROUND
    if profile == "full":
        everything = model in BUNDLED and len(wanted) == len(choose([], profile))
        known = f", about {duration(FULL)} of one core" if everything else ", which may take long"
        long = f"with the studies' own settings{known}"
    elif model in BUNDLED:
        long = f"about {duration(total)} of one core"
    else:
        long = "at most about a minute each, where a study can choose"
    width = max(len(one.study) for one in wanted)
    rows = [f"  {one.study.ljust(width)}  {one.why}" for one in wanted]
    return [f"{len(wanted)} studies of {model}, {long}; finished ones are taken as they are:", *rows]


def _finished(paths: list[Path]) -> list[Path]:
    """The runs among these that are finished; says which are not."""
    folders, unfinished = choose_runs(paths)
    if nothing := next((path for path in folders if not _is_run(path)), None):
        why = "neither" if nothing.exists() else "not there"
        raise UsageError(
            f"expected a run folder or a model, got {nothing}, which is {why}",
            hint=f"a run folder has {CONFIG} and {RESULT} (curvescope runs lists them), "
            f"the folder of a model one of {', '.join(MODELS)}",
        )
    if not folders:
        raise CurvescopeError(
            f"expected a finished run for the page, got {unfinished[0].path}, which is not finished",
            hint=_finishing(unfinished[0]),
        )
    for run in unfinished:
        typer.echo(f"left out: {run.path} is not finished; to finish it: {_finishing(run)}", err=True)
    return folders


def _write(folders: list[Path], made: Made, wish: Wish) -> None:
    if not folders:
        raise next(iter(made.failed.values()))
    there = wish.page.exists()
    write_page(folders, wish.page)
    if there:
        typer.echo(f"{wish.page} was there and is written anew", err=True)
    for study, error in made.failed.items():
        typer.echo(f"error: {study} failed and is not on the page: {_sentence(error)}", err=True)
    if wish.as_json:
        printing.as_json(
            {
                "page": str(wish.page.resolve()),
                "runs": [str(folder) for folder in folders],
                "failed": {study: _sentence(error) for study, error in made.failed.items()},
            }
        )
    else:
        typer.echo(f"the report is in {wish.page.resolve()}")
    if wish.open:
        webbrowser.open(wish.page.resolve().as_uri())


def _sentence(error: Exception) -> str:
    if isinstance(error, CurvescopeError):
        return error.message
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _finishing(run: RunInfo) -> str:
    """The command that goes on with a run that is not finished; a monitor's goes on with its loop."""
    if run.study == "monitor":
        return f"start its training loop again, with out={str(run.path)!r}"
    root = run.path.parent.parent
    return shlex.join(
        ["curvescope", "run", run.study, "--config", str(run.path / CONFIG), "--out", str(root)]
    )


WIDTH = 60  # of the settings in short
NONE = "–"


def show_runs(out: Path, *, as_json: bool) -> None:
    """Print every run folder: study, model, data, settings that are not the study's own, date, size."""
    runs = [*list_runs(out, depth=1), *list_runs(out)]  # those that were watched, and those of studies
    if as_json:
        printing.as_json([_run_as_dict(run) for run in runs])
        return
    if not runs:
        typer.echo(f"no runs in {out}", err=True)
        return
    rows = [
        [
            str(run.path),
            run.model or NONE,
            run.data or NONE,
            f"{run.start_time:%Y-%m-%d %H:%M}",
            data_size(run.size),
            "yes" if run.finished else "no",
            _short(run),
        ]
        for run in runs
    ]
    header = ["folder", "model", "data", "begun", "size", "finished", "settings"]
    printing.table(header, rows, right=(4,))


def ask_and_remove(paths: list[Path], *, sure: bool) -> None:
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
    """Return the settings that differ from the study's defaults."""
    own = (find(run.study).Config if run.study in STUDIES else Config)().to_dict()
    other = [f"{k}={printing.setting(v)}" for k, v in run.settings.items() if own.get(k) != v]
    text = " ".join(other)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def _run_as_dict(run: RunInfo) -> dict[str, object]:
    return {
        "folder": str(run.path),
        "study": run.study,
        "model": run.model,
        "data": run.data,
        "settings": dict(run.settings),
        "begun": run.start_time.isoformat(timespec="seconds"),
        "bytes": run.size,
        "finished": run.finished,
    }

"""`curvescope report` and `curvescope runs`: write the page; list and remove run folders."""

from __future__ import annotations

import shlex
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import typer

from curvescope.cli import printing
from curvescope.cli.arguments.command_line import wants_traceback
from curvescope.cli.arguments.settings_parsing import choose_device
from curvescope.cli.run_progress import progress_display
from curvescope.cli.study_run import exit_after_interrupt
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


class PageOptions(NamedTuple):
    """Options of a page besides the settings of its studies."""

    page: Path
    out: Path
    profile: str | None
    sections: list[str]
    force: bool
    quiet: bool
    as_json: bool
    open: bool


def show(sources: Sequence[str], given: Settings, options: PageOptions) -> None:
    """Write the page and print its path and what is missing. The exit code is 1 if a study failed."""
    if options.page.is_dir() or not options.page.parent.is_dir():
        raise UsageError(f"expected a file in an existing folder for the page, got {options.page}")
    check_writable(options.page.parent)
    batch = Made({}, {})
    if sources and not _is_model(sources):
        _check_unused(given, options)
        folders = _finished_runs([Path(path) for path in sources])
    else:
        batch = _run(sources[0] if sources else "tiny-gpt", given, options)
        folders = list(batch.folders.values())
    _write(folders, batch, options)
    if batch.failed:
        raise typer.Exit(1)


def _is_model(sources: Sequence[str]) -> bool:
    """Return True if the argument names a model. Run folders give False."""
    models = [name for name in sources if _names_model(name)]
    if models and len(sources) > 1:
        raise UsageError(
            f"expected one model, or run folders, got {models[0]!r} among {len(sources)}",
            hint="curvescope compare takes several models",
        )
    return bool(models)


def _names_model(name: str) -> bool:
    """Return True for a bundled name, a file, a folder with a model in it, or a hub id."""
    path = Path(name)
    if name in BUNDLED or path.is_file():
        return True
    if path.is_dir():
        return any((path / file).exists() for file in MODELS)
    return len(path.parts) == 1 or not path.parent.exists()


def _is_run(path: Path) -> bool:
    """Return True if a folder holds a run, or the reproduction of a paper."""
    return (path / CONFIG).exists() or is_reproduction(path)


def _check_unused(given: Settings, options: PageOptions) -> None:
    """Raise UsageError if settings are given for existing run folders."""
    words = [name for name, value in given.items() if value not in (None, [])]
    words += [name for name in ("profile", "sections", "force") if getattr(options, name)]
    if words:
        raise UsageError(
            f"expected a model with --{words[0]}, got run folders, which are shown as they are",
            hint=f"leave --{words[0]} out, or name a model",
        )


def _run(model: str, given: Settings, options: PageOptions) -> Made:
    """Run the studies that the sections need."""
    from curvescope.studies.batch_run import unsuited

    profile = options.profile or "quick"
    if profile not in PROFILES:
        raise UsageError(f"expected the profile quick or full, got {profile!r}")
    given = {**given, "model": model}
    wanted = choose(options.sections, profile)
    with progress_display(options.quiet) as display:
        given = choose_device(given, display.say)
        left_out = unsuited([entry.study for entry in wanted], given)
        for study, reason in left_out.items():
            display.say(f"left out: {study}: {reason}")
        wanted = [entry for entry in wanted if entry.study not in left_out]
        if not wanted:
            raise UsageError(f"nothing is left to show of {model}: {next(iter(left_out.values()))}")
        for line in _plan(model, wanted, profile):
            display.say(line)

        def begin(number: int, entry: Wanted) -> None:
            done = sum(other.seconds for other in wanted[: number - 1])
            name = f"{number} of {len(wanted)}: {entry.study}, {entry.why}"
            display.part(name, done, done + entry.seconds, sum(other.seconds for other in wanted))

        def fail(entry: Wanted, error: Exception) -> None:
            display.fail(f"{entry.study} failed: {_sentence(error)}")

        try:
            return run_all(
                wanted, given, out=options.out, profile=profile, force=options.force,
                strict=wants_traceback(), begin=begin, fail=fail,
                progress=display.piece, say=display.say, tell=display.answer,
            )  # fmt: skip
        except KeyboardInterrupt as stop:
            raise exit_after_interrupt(display, stop) from None


def _plan(model: str, wanted: Sequence[Wanted], profile: str) -> list[str]:
    """Describe the studies that will run, the reason for each, and the expected time."""
    total = sum(study.seconds for study in wanted) + AROUND
    if profile == "full":
        everything = model in BUNDLED and len(wanted) == len(choose([], profile))
        expectation = f", about {duration(FULL)} of one core" if everything else ", which may take long"
        expected_time = f"with the studies' own settings{expectation}"
    elif model in BUNDLED:
        expected_time = f"about {duration(total)} of one core"
    else:
        expected_time = "most of them about a minute at most"
    width = max(len(study.study) for study in wanted)
    rows = [f"  {study.study.ljust(width)}  {study.why}" for study in wanted]
    return [f"{len(wanted)} studies of {model}, {expected_time}; finished ones are reused:", *rows]


def _finished_runs(paths: list[Path]) -> list[Path]:
    """Return the finished runs among these, and print which are not finished."""
    folders, unfinished = choose_runs(paths)
    if other := next((path for path in folders if not _is_run(path)), None):
        reason = "neither" if other.exists() else "missing"
        raise UsageError(
            f"expected a run folder or a model, got {other}, which is {reason}",
            hint=f"a run folder has {CONFIG} and {RESULT} (curvescope runs lists them), "
            f"the folder of a model one of {', '.join(MODELS)}",
        )
    if not folders:
        raise CurvescopeError(
            f"expected a finished run for the page, got {unfinished[0].path}, which is not finished",
            hint=_command_to_finish(unfinished[0]),
        )
    for run in unfinished:
        typer.echo(f"left out: {run.path} is not finished; to finish it: {_command_to_finish(run)}", err=True)
    return folders


def _write(folders: list[Path], batch: Made, options: PageOptions) -> None:
    if not folders:
        raise next(iter(batch.failed.values()))
    existed = options.page.exists()
    write_page(folders, options.page)
    if existed:
        typer.echo(f"{options.page} existed and was overwritten", err=True)
    for study, error in batch.failed.items():
        typer.echo(f"error: {study} failed and is not on the page: {_sentence(error)}", err=True)
    if options.as_json:
        printing.as_json(
            {
                "page": str(options.page.resolve()),
                "runs": [str(folder) for folder in folders],
                "failed": {study: _sentence(error) for study, error in batch.failed.items()},
            }
        )
    else:
        typer.echo(f"the report is in {options.page.resolve()}")
    if options.open:
        webbrowser.open(options.page.resolve().as_uri())


def _sentence(error: Exception) -> str:
    if isinstance(error, CurvescopeError):
        return error.message
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _command_to_finish(run: RunInfo) -> str:
    """Return the command that resumes an unfinished run; for a monitor, start its training loop again."""
    if run.study == "monitor":
        return f"start its training loop again, with out={str(run.path)!r}"
    root = run.path.parent.parent
    return shlex.join(
        ["curvescope", "run", run.study, "--config", str(run.path / CONFIG), "--out", str(root)]
    )


WIDTH = 60  # characters of the column "settings"
EMPTY_CELL = "–"


def show_runs(out: Path, *, as_json: bool) -> None:
    """Print every run folder: study, model, data, settings that differ from the defaults, date, size."""
    runs = [
        *list_runs(out, depth=1),
        *list_runs(out),
    ]  # runs of monitors, then those of studies
    if as_json:
        printing.as_json([_run_as_dict(run) for run in runs])
        return
    if not runs:
        typer.echo(f"no runs in {out}", err=True)
        return
    rows = [
        [
            str(run.path),
            run.model or EMPTY_CELL,
            run.data or EMPTY_CELL,
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
    """Remove run folders. Ask before that unless `sure`."""
    runs = [read_run(path) for path in paths]
    for run in runs:
        state = "" if run.finished else ", not finished"
        typer.echo(
            f"{run.path}: {run.study} of {run.model or EMPTY_CELL}, {data_size(run.size)}{state}", err=True
        )
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

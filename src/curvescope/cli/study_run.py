"""`curvescope run` and `curvescope report`."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from curvescope.cli import printing
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress, listening

if TYPE_CHECKING:
    from curvescope.runs.shown import Shown


def merge(config: Path | None, pairs: list[str], given: dict[str, Any]) -> dict[str, Any]:
    """Settings from a TOML file, then KEY=VALUE pairs, then options: the later wins."""
    settings: dict[str, Any] = {}
    if config is not None:
        try:
            settings = tomllib.loads(config.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"expected settings in TOML, could not read {config}: {error}") from error
        for own in ("study", "version"):  # a run folder's config.toml has these
            settings.pop(own, None)
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"expected KEY=VALUE after --set, got {pair!r}")
        settings[key.strip()] = _value(value.strip())
    settings.update({key: value for key, value in given.items() if value not in (None, [])})
    return settings


def _value(text: str) -> Any:
    """A TOML value, or the text itself."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def show(study: str, settings: dict[str, Any], *, out: Path, quiet: bool) -> None:
    """Run a study and print where it is and its tables."""
    path, result = _run(study, settings, out=out, quiet=quiet)
    for name, frame in result.tables().items():
        typer.echo(f"\n{name}")
        rows = frame.to_numpy(dtype=object).tolist()
        numbers = [i for i, kind in enumerate(frame.dtypes) if kind.kind in "fi"]
        printing.table(list(frame.columns), rows, right=numbers)
    for note in result.notes:
        typer.echo(f"\nnote: {note}")
    typer.echo(f"\n{path}")


def report(runs: list[Path], *, page: Path, out: Path, quiet: bool) -> None:
    """Write the page from run folders, or from a run of `spectrum` on the bundled model."""
    from curvescope.report import write_page

    if page.is_dir() or not page.parent.is_dir():
        raise UsageError(f"expected a file in an existing folder for the page, got {page}")
    folders = runs or [_run("spectrum", {}, out=out, quiet=quiet)[0]]
    write_page(folders, page)
    typer.echo(f"the report is in {page.resolve()}")


def _run(study: str, settings: dict[str, Any], *, out: Path, quiet: bool) -> tuple[Path, Shown]:
    from curvescope.studies import folder

    with shown(quiet) as progress:
        return folder.run(study, settings, out=out, progress=progress, say=lambda s: typer.echo(s, err=True))


@contextmanager
def shown(quiet: bool) -> Iterator[Progress | None]:
    """Two bars on a terminal, one for the pieces of the study and one for the loop inside the current one."""
    if quiet:
        with listening(lambda what, done, total: None):
            yield None
        return
    if not sys.stderr.isatty():
        yield lambda what, done, total: typer.echo(f"{done}/{total} {what}", err=True)
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        whole, inner = bars.add_task("starting", total=None), bars.add_task("", total=None)

        def piece(what: str, number: int, total: int) -> None:
            bars.update(whole, description=what, completed=number - 1, total=total)

        def loop(what: str, done: int, total: int) -> None:
            bars.update(inner, description=f"  {what}", completed=done, total=total or None)

        with listening(loop):
            yield piece

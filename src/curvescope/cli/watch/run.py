"""`curvescope watch`: the measurements of a monitor while its training run goes on."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

import typer
from rich.console import Console
from rich.live import Live

from curvescope.cli import printing
from curvescope.cli.watch.view import line, panel, since
from curvescope.runs.growing import Growing

POLL_SECONDS = 0.5


def show(folder: Path, *, once: bool, as_json: bool) -> None:
    """Show the run until it is finished: a panel on a terminal, a line for every measurement in a pipe.

    Args:
        once: print the panel and end.
        as_json: print the last row, with the run's status, as an object and end.
    """
    run = Growing(folder)
    if as_json:
        printing.as_json(_as_dict(run))
        return
    if once:
        Console(highlight=False, soft_wrap=True).print(panel(run))
        return
    with suppress(KeyboardInterrupt):  # so one leaves
        _live(run) if sys.stdout.isatty() else _follow(run)


def _live(run: Growing) -> None:
    with Live(panel(run), console=Console(highlight=False), auto_refresh=False) as live:
        finished = run.status() == "finished"
        while not finished:
            time.sleep(POLL_SECONDS)
            finished = run.status() == "finished"
            run.refresh()
            live.update(panel(run), refresh=True)


def _follow(run: Growing) -> None:
    """Rows that are there, then each that comes; what the run does otherwise goes to stderr."""
    told, status = "going on", run.status()  # asked first: then no row of a finished run comes later
    rows = [*run.rows, *run.refresh()]
    while True:
        for row in rows:
            typer.echo(line(row))
        sys.stdout.flush()
        if status not in (told, "going on", "measuring"):
            typer.echo(f"{status} ({since(run, status)})", err=True)
        if status == "finished":
            return
        time.sleep(POLL_SECONDS)
        told, status = status, run.status()
        rows = run.refresh()


def _as_dict(run: Growing) -> dict[str, object]:
    last: dict[str, object] = dict(run.last())
    if run.rows:
        last["step"] = int(run.last()["step"])
    return {**last, "status": run.status(), **({"end": end} if (end := run.end()) else {})}

"""`curvescope diagnose`: findings, worst first, as text or as a list of objects."""

from __future__ import annotations

import textwrap
from pathlib import Path

import typer

from curvescope.cli import printing
from curvescope.cli.study_run import Wish, carry_out
from curvescope.core.config import Settings
from curvescope.core.errors import UsageError
from curvescope.runs.listing import read_run
from curvescope.studies.diagnose import Diagnosis, Finding
from curvescope.studies.diagnose.view import finding_row, verdict

WIDTH = 100  # of a line, in characters
INDENT = " " * 4


def show(pairs: list[str], given: Settings, wish: Wish) -> None:
    """Diagnose, or find it done, and print what was found."""
    _check_model(str(given["model"]))
    path, found = carry_out("diagnose", None, pairs, given, wish)
    assert isinstance(found, Diagnosis)
    if wish.as_json:
        unseen = [check for check in found.checks if check.severity == "not looked at"]
        printing.as_json([finding_row(check) for check in [*found.findings, *unseen]])
    else:
        _print(path, found)


def _check_model(source: str) -> None:
    """Raise if a run folder is given instead of a model."""
    try:
        run = read_run(Path(source))
    except UsageError:
        return
    monitor = run.study == "monitor"
    raise UsageError(
        f"expected a model, got {source}, a run folder of {'a monitor' if monitor else run.study}",
        hint=(f"curvescope watch {source} shows it, " if monitor else "")
        + f"curvescope report {source} makes a page of it; diagnose takes the model that was trained",
    )


def _print(path: Path, found: Diagnosis) -> None:
    typer.echo(f"{found.model} on {found.data}: {verdict(found)}")
    for finding in found.findings:
        typer.echo("")
        _print_finding(finding)
    unseen = [check for check in found.checks if check.severity == "not looked at"]
    if unseen:
        typer.echo("\nnot looked at")
        printing.lines([(f"{INDENT}{check.name}", "", check.meaning) for check in unseen])
    typer.echo("")
    for note in found.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"\n{path}")


def _print_finding(finding: Finding) -> None:
    where = f", {finding.where}" if finding.where else ""
    typer.echo(f"{finding.severity}: {finding.name} {finding.number} ({finding.unit}){where}")
    parts = {"": finding.meaning, "do: ": finding.advice, "evidence: ": finding.evidence}
    for label, words in parts.items():
        if words:
            typer.echo(textwrap.fill(label + words, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT))

"""`curvescope diagnose`: print findings, worst first, as text or as JSON."""

from __future__ import annotations

import textwrap
from pathlib import Path

import typer

from curvescope.cli import printing
from curvescope.cli.study_run import RunOptions, run_or_load
from curvescope.cli.watch import run_finding_row
from curvescope.core.config import Settings
from curvescope.core.errors import UsageError
from curvescope.core.number_format import plural, rounded
from curvescope.monitor import diagnosis
from curvescope.monitor.diagnosis import RunFinding
from curvescope.monitor.run_history import read_run as read_history
from curvescope.monitor.run_history import stable_rate
from curvescope.runs.listing import read_run
from curvescope.runs.live_history import HISTORY
from curvescope.studies.diagnose import Diagnosis, Finding
from curvescope.studies.diagnose.view import finding_row, verdict

WIDTH = 100  # characters in a line
INDENT = " " * 4


def show(pairs: list[str], given: Settings, options: RunOptions) -> None:
    """Diagnose a model, or the folder of a monitor, and print the findings."""
    if _is_monitored(str(given["model"])):
        _show_run(Path(str(given["model"])), pairs, given, options)
        return
    path, result = run_or_load("diagnose", None, pairs, given, options)
    assert isinstance(result, Diagnosis)
    if options.as_json:
        skipped = [check for check in result.checks if check.severity == "not looked at"]
        printing.as_json([finding_row(check) for check in [*result.findings, *skipped]])
    else:
        _print(path, result)


def _is_monitored(source: str) -> bool:
    """Return True if this is the folder of a monitor, or would be in an existing folder of runs.

    Raise if it is the folder of a study.
    """
    path = Path(source)
    missing = len(path.parts) > 1 and path.parent.is_dir() and not path.exists()
    if missing or (path / HISTORY).exists():
        return True
    try:
        run = read_run(path)
    except UsageError:
        return False
    if run.study == "monitor":
        return True
    raise UsageError(
        f"expected a model, or the folder of a monitor, got {source}, a run folder of {run.study}",
        hint=f"curvescope report {source} makes a page of it; diagnose takes the model that was trained",
    )


def _show_run(folder: Path, pairs: list[str], given: Settings, options: RunOptions) -> None:
    """Print the findings about a training run, from its history."""
    used = [name for name, value in given.items() if value not in (None, []) and name != "model"]
    if used or pairs:
        raise UsageError(
            f"expected a model with {used[0] if used else pairs[0]}, got {folder}, the folder of a monitor",
            hint="a run is diagnosed from its history, without settings",
        )
    history = read_history(folder)
    findings = diagnosis.diagnose_run(history)
    if options.as_json:
        printing.as_json([run_finding_row(finding) for finding in findings])
        return
    typer.echo(f"{folder}: {diagnosis.verdict(findings)} in {plural(len(history.at), 'measurement')}")
    for finding in findings:
        typer.echo(f"\n{finding.severity}: {finding.name}, step {finding.step}")
        _print_parts({"": finding.evidence, "do: ": finding.remedy, "limit: ": _limit(finding)})
    if (rate := stable_rate(history)) is not None:
        typer.echo(f"\n{rate.sentence()}")


def _limit(finding: RunFinding) -> str:
    return f"{finding.unit} {rounded(finding.value, 3)}, limit {finding.limit:g}: {finding.reason}"


def _print(path: Path, result: Diagnosis) -> None:
    typer.echo(f"{result.model} on {result.data}: {verdict(result)}")
    for finding in result.findings:
        typer.echo("")
        _print_finding(finding)
    skipped = [check for check in result.checks if check.severity == "not looked at"]
    if skipped:
        typer.echo("\nnot looked at")
        printing.lines([(f"{INDENT}{check.name}", "", check.meaning) for check in skipped])
    typer.echo("")
    for note in result.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"\n{path}")


def _print_finding(finding: Finding) -> None:
    where = f", {finding.where}" if finding.where else ""
    typer.echo(f"{finding.severity}: {finding.name} {finding.number} ({finding.unit}){where}")
    _print_parts({"": finding.meaning, "do: ": finding.advice, "evidence: ": finding.evidence})


def _print_parts(parts: dict[str, str]) -> None:
    for label, words in parts.items():
        if words:
            typer.echo(textwrap.fill(label + words, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT))

"""`curvescope watch`: show a training run while it trains."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from curvescope.cli import printing
from curvescope.core.number_format import duration, plural, rounded, short_duration, with_error
from curvescope.monitor import diagnosis
from curvescope.monitor.run_history import RunHistory
from curvescope.runs.live_history import BLOCKS, STEPS, LiveHistory, Row, Status

BARS, WIDTH, GAUGE = "▁▂▃▄▅▆▇█", 40, 30
NEAR = 0.9  # of a threshold
MOST_BLOCKS = 5
COLORS = {"below": "green", "near": "yellow", "above": "red"}
STATES = {"finished": "bold green", "going on": "bold cyan", "measuring": "bold cyan", "stopped": "bold red"}
LEVELS = {"fault": "bold red", "warning": "yellow", "note": "cyan"}
RATIOS = {  # words, and the column of the threshold; through the optimizer's own diagonal P the second time
    "lr_lambda_max": ("η·λ_max", "threshold"),
    "lr_sharpness": ("η·λ_max(P⁻¹H)", "sharpness_threshold"),
}
REST = {  # numbers of the last row that are shown as they are
    "lambda_min": "λ_min",
    "trace": "trace",
    "ggn_lambda_max": "λ_max of GGN",
    "ggn_gap": "gap H − H_o",
    "grad_norm": "‖g‖",
    "curvature_along_gradient": "gᵀHg/‖g‖²",
    "grad_share": "g in top space",
    "overlap": "overlap",
}
FINDING_KEYS = (
    "name", "severity", "step", "value", "limit", "unit", "where", "evidence", "remedy", "reason",
)  # fmt: skip
ERRORS = {"lambda_max": "lambda_max_error", "lambda_min": "lambda_min_error", "trace": "trace_stderr"}


def panel(run: LiveHistory) -> RenderableType:
    """All of a run that fits on a screen."""
    last = run.last()
    if not last:
        return Group(_head(run), Text("no measurement yet"))
    table = Table.grid(padding=(0, 2))
    table.add_row("loss", _value(last, "loss"), _course(run, "loss"))
    table.add_row("λ_max", _value(last, "lambda_max"), _course(run, "lambda_max"))
    for name, value, threshold in _ratios(last):
        table.add_row(RATIOS[name][0], rounded(value), _gauge(value, threshold))
    rest = [f"{words} {_value(last, name)}" for name, words in REST.items() if _known(last, name)]
    above = [words for name, _, _ in _ratios(last) if (words := _above(run, name))]
    findings = _diagnosed(run)
    parts = [
        _head(run),
        *_finding_lines(findings),
        Text(),
        table,
        Text(),
        *map(Text, [*above, *_lines(rest)]),
    ]
    if last.get("converged") == 0:
        parts.append(Text("λ_max and λ_min are not converged: bounds from inside", style="yellow"))
    if blocks := run.blocks()[:MOST_BLOCKS]:
        parts.append(Text("sharpest blocks: " + ", ".join(f"{name} {rounded(top)}" for name, top in blocks)))
    return Group(*parts, Text(f"{_cost(run)}{'' if findings else '; nothing unusual'}"))


def _diagnosed(run: LiveHistory) -> list[diagnosis.RunFinding]:
    """Findings of the diagnosis so far."""
    history = RunHistory.from_rows(run.rows, run.table(BLOCKS), run.table(STEPS))
    return diagnosis.diagnose_run(history)


def _finding_lines(findings: Sequence[diagnosis.RunFinding]) -> list[Text]:
    """A line for each finding, behind an empty one."""
    lines = [Text.assemble((f.severity, LEVELS[f.severity]), f": {f.sentence()}") for f in findings]
    return [Text(), *lines] if lines else []


def line(row: Row) -> str:
    """One measurement."""
    parts = [f"step {row['step']:.0f}", f"loss {_value(row, 'loss')}", f"λ_max {_value(row, 'lambda_max')}"]
    for name, value, threshold in _ratios(row):
        parts.append(f"{RATIOS[name][0]} {rounded(value)} ({verdict(value, threshold)} {threshold:.4g})")
    if _known(row, "share"):
        parts.append(f"{row['share']:.1%} of the time")
    return "  ".join(parts)


def since(run: LiveHistory, status: Status) -> str:
    """Say how long a run has been silent, or how many measurements it has."""
    if status == "finished":
        return _made(run)
    if status == "measuring" and (now := run.measuring()):
        return f"step {now['step']:.0f}, {now['products']:.0f} of about {now['expected']:.0f} products"
    if status == "stopped":
        return f"or paused: nothing for {duration(run.age())}"
    return f"the last row {duration(run.age())} ago" if run.rows else "no row yet"


def _made(run: LiveHistory) -> str:
    """Number of measurements, step of the last one, and number that the budget did not allow."""
    words, end = plural(len(run.rows), "measurement"), run.end()
    if end and run.rows and end["step"] > run.last()["step"]:
        words += f", the last at step {run.last()['step']:.0f}"
    return f"{words}, {end['skipped']:.0f} skipped for the budget" if end.get("skipped") else words


def verdict(value: float, threshold: float) -> Literal["below", "near", "above"]:
    """Return above, near or below for a product of learning rate and curvature; near begins a tenth below."""
    if value > threshold:
        return "above"
    return "near" if value > NEAR * threshold else "below"


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Values as bars, from the least to the largest; where several share a bar, the largest, so that a spike
    is seen. What is not finite is a gap.
    """
    count = min(len(values), width)
    shares = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    tops = [max((v for v in share if math.isfinite(v)), default=math.nan) for share in shares]
    known = [top for top in tops if not math.isnan(top)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if math.isnan(top) else BARS[round((top - low) * scale)] for top in tops)


def _head(run: LiveHistory) -> Text:
    status = run.status()
    last = run.end().get("step", run.last().get("step"))
    step = "" if last is None else f" · step {last:.0f}"
    return Text.assemble(f"{run.folder}{step} · ", (status, STATES[status]), f" ({since(run, status)})")


def _ratios(row: Row) -> list[tuple[str, float, float]]:
    """Name, value and threshold of those of RATIOS that were measured and say something of their own."""
    ratios = [
        (name, row[name], row[limit]) for name, (_, limit) in RATIOS.items() if _known(row, name, limit)
    ]
    return ratios[:1] if len(ratios) == 2 and ratios[0][1:] == ratios[1][1:] else ratios


def _above(run: LiveHistory, name: str) -> str:
    """Say how often a ratio was above its threshold, and at which step most; empty if it never was.

    The first steps of an adaptive optimizer do not count: its preconditioner is not formed yet.
    """
    formed = RunHistory.from_rows(run.rows).is_formed()
    counted = [row for row, counts in zip(run.rows, formed, strict=True) if counts]
    rows = [row for row in counted if _known(row, name, RATIOS[name][1])]
    above = [row for row in rows if row[name] > row[RATIOS[name][1]]]
    if not above:
        return ""
    worst = max(above, key=lambda row: row[name])
    often, most = f"at {len(above)} of {plural(len(rows), 'measurement')}", rounded(worst[name])
    return f"{RATIOS[name][0]} was above its threshold {often}, most at step {worst['step']:.0f}: {most}"


def _gauge(value: float, threshold: float) -> Text:
    """A bar up to the threshold; full is at it or above."""
    word = verdict(value, threshold)
    share = min(max(value / threshold, 0.0), 1.0) if math.isfinite(value) else 1.0
    filled = math.floor(share * GAUGE)
    bar = "█" * filled + "░" * (GAUGE - filled)
    return Text.assemble((bar, COLORS[word]), f" {word} {threshold:.4g}")


def _course(run: LiveHistory, name: str) -> str:
    values = [value for value in run.column(name) if math.isfinite(value)]
    if len(values) < 2:
        return ""
    return f"{sparkline(run.column(name))}  {rounded(min(values))} to {rounded(max(values))}"


def _value(row: Row, name: str) -> str:
    if not _known(row, name):
        return "–"
    error = row.get(ERRORS.get(name, ""), math.nan)
    return rounded(row[name]) if math.isnan(error) else with_error(row[name], error)


def _known(row: Row, *names: str) -> bool:
    return not any(math.isnan(row.get(name, math.nan)) for name in names)


def _cost(run: LiveHistory) -> str:
    last = run.last()
    parts = [plural(len(run.rows), "measurement")]
    if "share" in run.end():
        parts.append(f"{run.end()['share']:.1%} of the time")
    elif _known(last, "share"):
        parts.append(f"{last['share']:.1%} of the time so far")
    if _known(last, "cost_seconds"):
        parts.append(f"the last took {short_duration(last['cost_seconds'])}")
    return ", ".join(parts)


def _lines(words: list[str], each: int = 3) -> list[str]:
    return ["   ".join(words[i : i + each]) for i in range(0, len(words), each)]


POLL_SECONDS = 0.5


def show(folder: Path, *, once: bool, as_json: bool) -> None:
    """Show the run until it is finished: a panel on a terminal, a line for every measurement in a pipe.

    Args:
        once: print the panel and end.
        as_json: print the last row, with the run's status, as an object and end.
    """
    run = LiveHistory(folder)
    if as_json:
        printing.as_json(_as_dict(run))
        return
    if once:
        Console(highlight=False, soft_wrap=True).print(panel(run))
        return
    with suppress(KeyboardInterrupt):  # so one leaves
        _live(run) if sys.stdout.isatty() else _follow(run)


def _live(run: LiveHistory) -> None:
    with Live(panel(run), console=Console(highlight=False), auto_refresh=False) as live:
        finished = run.status() == "finished"
        while not finished:
            time.sleep(POLL_SECONDS)
            finished = run.status() == "finished"
            run.refresh()
            live.update(panel(run), refresh=True)


def _follow(run: LiveHistory) -> None:
    """Rows that are there, then each that comes; what the run does otherwise goes to stderr."""
    last_status, status = "going on", run.status()  # asked first: then no row of a finished run comes later
    rows, known = [*run.rows, *run.refresh()], set[str]()
    while True:
        for row in rows:
            typer.echo(line(row))
        for finding in _diagnosed(run) if rows else []:
            if finding.name not in known:
                typer.echo(f"{finding.severity}: {finding.sentence()}")
            known.add(finding.name)
        sys.stdout.flush()
        if status not in (last_status, "going on", "measuring"):
            typer.echo(f"{status} ({since(run, status)})", err=True)
        if status == "finished":
            return
        time.sleep(POLL_SECONDS)
        last_status, status = status, run.status()
        rows = run.refresh()


def _as_dict(run: LiveHistory) -> dict[str, object]:
    last: dict[str, object] = dict(run.last())
    if run.rows:
        last["step"] = int(run.last()["step"])
    findings = [run_finding_row(finding) for finding in _diagnosed(run)]
    more = {"findings": findings} if run.rows else {}
    return {**last, **more, "status": run.status(), **({"end": end} if (end := run.end()) else {})}


def run_finding_row(finding: diagnosis.RunFinding) -> dict[str, object]:
    """A finding as an object."""
    return {name: getattr(finding, name) for name in FINDING_KEYS}

"""A reproduction of a paper: all claims with verdicts, then its figures."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

from curvescope.core.errors import UsageError
from curvescope.core.number_format import duration
from curvescope.papers import all_claims, figures_of, find_figure
from curvescope.papers import folder as reproduction
from curvescope.report.page_elements import VERDICTS, Entry, Methods, Tally, verdict
from curvescope.report.pieces.methods import methods, reproduce_command
from curvescope.report.pieces.pictures import pictures
from curvescope.report.pieces.tables import table
from curvescope.report.run_reader import Sheet, link
from curvescope.runs.folder import CONFIG
from curvescope.runs.study_result import Shown
from curvescope.runs.verification import checks


def is_reproduction(run: Path) -> bool:
    """Return True if a folder is that of a paper."""
    return (run / reproduction.SETTINGS).exists() and not (run / CONFIG).exists()


def written(run: Path) -> datetime:
    """Return the time when the last figure was finished."""
    return datetime.fromtimestamp((run / reproduction.SETTINGS).stat().st_mtime)


def paper_entries(run: Path, number: int, sheet: Sheet) -> list[Entry]:
    """All claims of a paper, then its figures."""
    meta = reproduction.read_settings(run)
    paper = meta["paper"]
    results = {
        name: reproduction.load_result(run, name)
        for name in figures_of(paper, more=True)
        if name in meta["figures"]
    }
    return [
        _all_claims(run, number, sheet.page, meta, results),
        *(_figure(run, number, sheet, meta, name, result) for name, result in results.items()),
    ]


def _all_claims(run: Path, number: int, page: Path, meta: dict[str, Any], results: dict[str, Shown]) -> Entry:
    claims = all_claims.table(results)
    counts = Counter(verdict(words) for words in claims["verdict"])
    anchor = f"paper{number}"
    return Entry(
        anchor=anchor,
        title=f"all claims of {meta['paper']}",
        words=meta["citation"],
        opening=f"{all_claims.tally(claims)}.",
        tallies=[Tally(level, counts[level]) for level in VERDICTS if counts[level]],
        claims=table(
            "claims",
            claims,
            all_claims.CAPTION,
            anchor=f"{anchor}-claims",
            csv=link(run / f"{reproduction.ALL_CLAIMS}.csv", page),
        ),
        source=run.name,
    )


def _figure(run: Path, number: int, sheet: Sheet, meta: dict[str, Any], figure: str, result: Shown) -> Entry:
    """A figure of a paper: what was claimed and what came out, then as for a run."""
    paper, entry, captions = meta["paper"], meta["figures"][figure], result.captions()
    words, anchor = figures_of(paper, more=True)[figure], f"paper{number}-{figure}"
    settings, env = entry["settings"], entry["environment"]
    time = duration(entry["seconds"]) if "seconds" in entry else ""

    def how(name: str) -> Methods:
        command = _command(paper, figure, settings)
        checked = checks.describe_errors(entry.get("verification", []))
        return methods(name, words, captions.get(name, ""), settings, env, time, command, checked=checked)

    claims = all_claims.table({figure: result}).drop(columns="figure")
    title = "published and measured"
    tables = [
        table(
            name, frame, captions.get(name, ""), anchor=f"{anchor}-{name}-table",
            csv=link(run / f"{name}.csv", sheet.page),
        )
        for name, frame in result.tables().items()
    ]  # fmt: skip
    stills = {Path(name).stem: run / name for name in entry["files"] if name.endswith(".png")}
    return Entry(
        anchor=anchor,
        title=f"{figure} of {paper}",
        words=words,
        opening=result.opening(),
        notes=result.notes,
        pictures=pictures(stills, result.scenes(), captions, anchor=anchor, methods=how, most=sheet.largest),
        tables=[table(title, claims, anchor=f"{anchor}-claims"), *tables] if len(claims) else tables,
        settings=settings,
        source=f"{run.name}/{figure}",
    )


def _command(paper: str, figure: str, settings: dict[str, Any]) -> str:
    try:
        return reproduce_command(paper, figure, find_figure(paper, figure).Config, settings)
    except UsageError:  # a setting that this version does not know
        return ""

"""Entries of a run on the page, section by section."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from curvescope.core.errors import UsageError
from curvescope.monitor.result import Monitored
from curvescope.report.page_elements import Entry, Methods, Picture, Table
from curvescope.report.pieces.cards import run_findings
from curvescope.report.pieces.methods import methods, run_command, time_of
from curvescope.report.pieces.pictures import pictures
from curvescope.report.pieces.tables import table
from curvescope.report.run_reader import Read, Sheet, link
from curvescope.report.sections import SECTIONS, home_of, place_of
from curvescope.runs.study_result import Line
from curvescope.runs.verification import checks
from curvescope.studies import RUNS, STUDIES, find

Placed = Mapping[str, Entry]
"""Entries of one run by the anchor of their section."""
Shape = TypeVar("Shape", Picture, Table)
NOTE = "note"  # the label of a line of a summary that is none of the numbers


def entries(run: Read, sheet: Sheet) -> dict[str, Entry]:
    """The entry of the section that the study is at home in, and of those that show a part of it."""
    home = home_of(run.study)
    drawn, tables = _pictures(run, sheet.largest), _tables(run, sheet.page)
    sections = {home: None} | {place_of(run.study, name): None for name in [*drawn, *tables]}
    return {anchor: _entry(run, anchor, home, drawn, tables) for anchor in sections}


def _entry(
    run: Read, anchor: str, home: str, drawn: Mapping[str, Picture], tables: Mapping[str, Table]
) -> Entry:
    result, here = run.result, anchor == home
    summary = result.summary() if here else []
    return Entry(
        anchor=f"run{run.number}" if here else f"run{run.number}-{anchor}",
        title=f"{run.study} of {' and '.join(run.subjects)}" if run.subjects else run.study,
        words=RUNS[run.study] if here else "",
        opening=result.opening() if here else result.beside().get(anchor, ""),
        sample=run.sample,
        cards=[line for line in summary if line[0] != NOTE],
        findings=run_findings(result.findings) if here and isinstance(result, Monitored) else (),
        notes=list(dict.fromkeys([*_notes(summary), *result.notes])) if here else [],
        pictures=_placed(run, anchor, drawn),
        tables=_placed(run, anchor, tables),
        settings=run.settings if here else {},
        source=run.source,
        home=None if here else (f"run{run.number}", SECTIONS[home].title),
    )


def _placed(run: Read, anchor: str, found: Mapping[str, Shape]) -> list[Shape]:
    """Return what of a run belongs to a section; outside its own it is named after its study."""
    here = [one for name, one in found.items() if place_of(run.study, name) == anchor]
    if anchor == home_of(run.study):
        return here
    return [replace(one, heading=f"{one.heading} ({run.study})") for one in here]


def _notes(summary: list[Line]) -> list[str]:
    return [words for label, _, words in summary if label == NOTE]


def _pictures(run: Read, most: int) -> dict[str, Picture]:
    captions, scenes = run.result.captions(), run.result.scenes()
    stills = {path.stem: path for path in (run.path / "figures").glob("*.svg")}
    time, command = time_of(run.path, run.begun), command_of(run)
    checked = checks.describe_errors(checks.read_verifications(run.path))

    def how(name: str) -> Methods:
        caption = scenes.get(name, {}).get("caption") or captions.get(name, "")
        what = RUNS[run.study]
        return methods(name, what, caption, run.settings, run.env, time, command, checked=checked)

    found = pictures(stills, scenes, captions, anchor=f"run{run.number}", methods=how, most=most)
    return {one.anchor.removeprefix(f"run{run.number}-"): one for one in found}


def _tables(run: Read, page: Path) -> dict[str, Table]:
    captions = run.result.captions()
    return {
        name: table(
            name,
            frame,
            captions.get(name, ""),
            anchor=f"run{run.number}-{name}-table",
            csv=link(run.path / "tables" / f"{name}.csv", page),
        )
        for name, frame in run.result.tables().items()
    }


def command_of(run: Read) -> str:
    """The command that makes a run again; "" for one that a training loop made."""
    if run.study not in STUDIES:
        return ""
    try:
        return run_command(run.study, find(run.study), run.settings)
    except UsageError:  # a setting that this version does not know
        return ""


def texts(entry: Entry) -> Iterator[str]:
    """Return all texts of an entry that a reader may look up in the glossary."""
    yield entry.opening
    for line in entry.cards:
        yield from line
    for found in entry.findings:
        yield from (found.unit, found.meaning, found.advice)
    tables = [*entry.tables, *([entry.claims] if entry.claims else [])]
    for one in (*entry.pictures, *tables):
        yield from (one.heading, one.caption)
    for one in entry.pictures:
        yield one.scene_caption
    for one in tables:
        yield from one.header
        yield from (cell.text for row in one.rows for cell in row if not cell.number)

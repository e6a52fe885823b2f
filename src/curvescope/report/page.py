"""Build a page from run folders: sections in their order, everything inside one file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from curvescope import __version__
from curvescope.core.errors import UsageError
from curvescope.report.glossary import Term, used_in
from curvescope.report.page_elements import Card, Cell, Entry, Section, Table, largest
from curvescope.report.papers import is_reproduction, paper_entries, written
from curvescope.report.pieces.cards import cards, chosen_small, errors_told, findings
from curvescope.report.pieces.pictures import library
from curvescope.report.run_reader import Read, Sheet, read, told_apart
from curvescope.report.run_sections import command_of, entries, texts
from curvescope.report.sections import SECTIONS, rank
from curvescope.studies.diagnose.study import Diagnosis
from curvescope.studies.diagnose.view import verdict

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

ASSETS = files("curvescope.report") / "assets"
FEW_ROWS = 12  # a table with more is folded


@dataclass(frozen=True)
class About:
    """Contents of the last section."""

    runs: Table
    environments: Sequence[dict[str, str]]
    terms: Sequence[Term]


def write_page(runs: Sequence[str | Path], page: str | Path) -> Path:
    """Write one HTML file that shows every run, or reproduction of a paper; complete or not at all."""
    if not runs:
        raise UsageError("expected at least one run folder, got none")
    page = Path(page)
    html = render([Path(run) for run in runs], page)
    partial = page.with_name(page.name + ".partial")
    partial.write_text(html, encoding="utf-8")
    partial.replace(page)
    return page


def render(paths: Sequence[Path], page: Path) -> str:
    """The text of the page that shows these runs from the place `page`."""
    papers = {number: path for number, path in enumerate(paths, start=1) if is_reproduction(path)}
    runs = told_apart([read(path, i) for i, path in enumerate(paths, start=1) if i not in papers])
    sheet = Sheet(page, largest(sum(1 for path in paths for _ in path.rglob("*.png"))))
    shown = _by_section(runs, sheet)
    for number, path in papers.items():
        shown.setdefault("papers", []).extend(paper_entries(path, number, sheet))
    models = cards(runs)
    there = [a for a in SECTIONS if shown.get(a) or (a == "model" and models)]
    shown["findings"] = [_with_findings(entry, runs, there) for entry in shown.get("findings", [])]
    sections = [_section(anchor, shown.get(anchor, []), models) for anchor in [*there, "about"]]
    every = [entry for section in sections for entry in section.entries]
    dates = [*(run.begun for run in runs), *(written(path) for path in papers.values())]
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=_title(runs, [entry.title for entry in shown.get("papers", [])]),
            date=_spoken(max(dates)),
            errors=errors_told(runs),
            small=chosen_small(runs),
            samples=_samples(runs),
            sections=sections,
            about=_about(runs, papers, every),
            version=__version__,
            plotly=library(every),
            css=_asset("page.css"),
            script=_asset("page.js"),
            scene_script=_asset("scenes.js"),
        )
    )


def _by_section(runs: Sequence[Read], sheet: Sheet) -> dict[str, list[Entry]]:
    """The entries of every section: runs that are at home in it first, in the order of their studies."""
    found: dict[str, list[Entry]] = {}
    for run in sorted(runs, key=lambda run: rank(run.study)):
        for anchor, entry in entries(run, sheet).items():
            found.setdefault(anchor, []).append(entry)
    return {anchor: sorted(some, key=lambda entry: entry.home is not None) for anchor, some in found.items()}


def _with_findings(entry: Entry, runs: Sequence[Read], there: Sequence[str]) -> Entry:
    """The entry of a diagnosis, its findings in the place of cards."""
    run = next(run for run in runs if entry.anchor == f"run{run.number}")
    if not isinstance(run.result, Diagnosis):
        return entry
    tables = run.result.tables()
    made = findings(run.result, anchor=entry.anchor, tables=list(tables), there=there)
    rest = [one for one in entry.tables if one.anchor != f"{entry.anchor}-findings-table"]
    opening = entry.opening or f"{verdict(run.result)}."
    return replace(entry, opening=opening, findings=made, cards=[], tables=rest)


def _section(anchor: str, shown: Sequence[Entry], models: Sequence[Card]) -> Section:
    place = SECTIONS[anchor]
    return Section(anchor, place.title, place.short, shown, models if anchor == "model" else ())


def _about(runs: Sequence[Read], papers: dict[int, Path], shown: Sequence[Entry]) -> About:
    rows = [
        [run.study, run.model, str(run.settings.get("data", "")), run.source, f"{run.begun:%Y-%m-%d %H:%M}",
         command_of(run)]
        for run in runs
    ]  # fmt: skip
    rows += [
        ["paper", path.name, "", path.name, f"{written(path):%Y-%m-%d %H:%M}", ""] for path in papers.values()
    ]
    header = ["study", "model", "data", "folder", "begun", "command"]
    told = [{k: v for k, v in run.env.items() if k != "contents"} for run in runs]
    distinct = [env for i, env in enumerate(told) if env and env not in told[:i]]
    cells = [[Cell(text, text) for text in row] for row in rows]
    words = used_in(text for entry in shown for text in texts(entry))
    return About(Table("runs-table", "Runs", "", header, cells), distinct, words)


def _title(runs: Sequence[Read], papers: Sequence[str]) -> str:
    """The models, or the papers, that the page is about."""
    models = list(dict.fromkeys(name for run in runs for name in run.subjects))
    names = models or [title.removeprefix("all claims of ") for title in papers[:1]] or ["measurements"]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _samples(runs: Sequence[Read]) -> str:
    """Say which studies measured which sample, if the samples differ."""
    told: dict[tuple[str, ...], str] = {}
    for run in sorted(runs, key=lambda run: run.terms is None):  # those that counted have the better words
        if run.sample:
            told.setdefault(run.asked, run.sample)
    found: dict[str, list[str]] = {}
    for run in (run for run in runs if run.sample):
        studies = found.setdefault(told[run.asked], [])
        if run.study not in studies:
            studies.append(run.study)
    if len(found) < 2:
        return ""
    each = "; ".join(f"{sample}: {', '.join(studies)}" for sample, studies in found.items())
    return f"Numbers differ between sections that were measured on different samples. {each}."


def _spoken(date: datetime) -> str:
    return f"{date.day} {date:%B %Y}"


def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, select_autoescape

    made = Environment(
        loader=FunctionLoader(_asset),
        autoescape=select_autoescape(default=True),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["prose"] = _prose
    made.globals["few_rows"] = FEW_ROWS
    return made


def _prose(text: str) -> Markup:
    """Words between backticks as code; everything else is escaped."""
    from markupsafe import Markup, escape

    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")

"""From run folders to a page: figures embedded, tables sortable, settings folded away."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curvescope import __version__
from curvescope.core.errors import UsageError
from curvescope.papers import all_claims, figures_of
from curvescope.papers import folder as reproduction
from curvescope.report.glossary import used_in
from curvescope.report.headings import heading
from curvescope.report.scenes import Section, library, scenes
from curvescope.runs.folder import CONFIG
from curvescope.runs.shown import Shown
from curvescope.studies import RUNS, folder

if TYPE_CHECKING:
    import pandas as pd

KINDS = {".svg": "image/svg+xml", ".png": "image/png"}
MOST_ROWS = 2000  # of a table on the page


def write_page(runs: Sequence[str | Path], page: str | Path) -> Path:
    """Write one HTML file that shows every run, or reproduction of a paper; complete or not at all."""
    from jinja2 import Environment, select_autoescape

    if not runs:
        raise UsageError("expected at least one run folder, got none")
    template = (files("curvescope.report") / "page.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=select_autoescape(default=True), trim_blocks=True, lstrip_blocks=True
    )
    sections = [section for run in runs for section in _sections(Path(run))]
    for section in sections:
        section["terms"] = used_in(_texts(section))
    html = environment.from_string(template).render(
        sections=sections, version=__version__, plotly=library(sections)
    )
    page = Path(page)
    partial = page.with_name(page.name + ".partial")
    partial.write_text(html, encoding="utf-8")
    partial.replace(page)
    return page


def _sections(run: Path) -> list[Section]:
    """One of a run folder, one per figure of a paper's."""
    if (run / reproduction.SETTINGS).exists() and not (run / CONFIG).exists():
        return _paper_sections(run)
    return [_section(run)]


def _paper_sections(run: Path) -> list[Section]:
    """All claims of a paper, then its figures."""
    meta = reproduction.read_settings(run)
    paper = meta["paper"]
    results = {
        name: reproduction.load_result(run, name)
        for name in figures_of(paper, more=True)
        if name in meta["figures"]
    }
    claims = all_claims.table(results)
    first: Section = {
        "study": "all claims",
        "words": f"{all_claims.tally(claims)}. {meta['citation']}",
        "model": paper,
        "revision": "",
        "run": run.name,
        "summary": [],
        "figures": [],
        "scenes": [],
        "tables": [_table("claims", claims, {"claims": all_claims.CAPTION})],
        "config": {},
        "env": {},
    }
    return [first, *(_paper_section(run, meta, name, result) for name, result in results.items())]


def _paper_section(run: Path, meta: dict[str, Any], figure: str, result: Shown) -> Section:
    """A figure of a paper: what was claimed and what came out, then as for a run."""
    paper, entry = meta["paper"], meta["figures"][figure]
    captions = result.captions()
    claims = all_claims.table({figure: result}).drop(columns="figure")
    pictures = [run / name for name in entry["files"] if name.endswith(".png")]
    return {
        "study": figure,
        "words": f"{figures_of(paper, more=True)[figure]}. {meta['citation']}",
        "model": paper,
        "revision": "",
        "run": run.name,
        "summary": [],
        "figures": [_figure(path, captions) for path in _sorted(pictures, captions)],
        "scenes": scenes(result, captions),
        "tables": [
            _table("published and measured", claims, {}),
            *(_table(name, frame, captions) for name, frame in result.tables().items()),
        ],
        "config": entry["settings"],
        "env": entry["environment"],
    }


def _section(run: Path) -> Section:
    """What the template needs of one run."""
    config, result = folder.load(run)
    study = str(config.pop("study"))
    captions = result.captions()
    env_file = run / "env.json"
    return {
        "study": study,
        "words": RUNS[study],
        "model": Path(str(config.get("model", ""))).name,
        "revision": config.get("revision", ""),
        "run": f"{run.parent.name}/{run.name}",
        "summary": result.summary(),
        "figures": [_figure(path, captions) for path in _in_order(run / "figures", captions)],
        "scenes": scenes(result, captions),
        "tables": [_table(name, frame, captions) for name, frame in result.tables().items()],
        "config": {key: value for key, value in config.items() if key != "version"},
        "env": json.loads(env_file.read_text(encoding="utf-8")) if env_file.exists() else {},
    }


def _texts(section: dict[str, Any]) -> Iterator[str]:
    """Every word of a section that a reader may want to look up."""
    for line in section["summary"]:
        yield from line
    for one in (*section["figures"], *section["scenes"], *section["tables"]):
        yield from (one["name"], one["caption"])
    for table in section["tables"]:
        yield from table["header"]
        yield from (cell["text"] for row in table["rows"] for cell in row if not cell["number"])


def _in_order(folder: Path, captions: dict[str, str]) -> list[Path]:
    """Figures in the order of their captions, then those without one."""
    return _sorted(list(folder.glob("*.svg")), captions)


def _sorted(paths: list[Path], captions: dict[str, str]) -> list[Path]:
    order = {name: i for i, name in enumerate(captions)}
    return sorted(paths, key=lambda path: (order.get(path.stem, len(order)), path.stem))


def _figure(path: Path, captions: dict[str, str]) -> dict[str, str]:
    encoded = base64.b64encode(path.read_bytes()).decode("ascii")
    name = path.stem
    return {
        "name": heading(name),
        "source": f"data:{KINDS[path.suffix]};base64,{encoded}",
        "caption": captions.get(name, ""),
    }


def _table(name: str, frame: pd.DataFrame, captions: dict[str, str]) -> Section:
    shown = frame.head(MOST_ROWS)
    rows = [[_cell(cell) for cell in row] for row in shown.to_numpy(dtype=object).tolist()]
    rest = (
        f" The first {MOST_ROWS:,} of {len(frame):,} rows; the CSV file has all."
        if len(frame) > MOST_ROWS
        else ""
    )
    return {
        "name": heading(name),
        "header": [str(column) for column in frame.columns],
        "rows": rows,
        "caption": (captions.get(name, "") + rest).strip(),
    }


def _cell(value: object) -> Section:
    """Text, the number to sort by, and whether it is one."""
    if isinstance(value, bool):
        return {"text": "yes" if value else "no", "sort": int(value), "number": False}
    if isinstance(value, int | float):
        text = "–" if math.isnan(value) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
        return {"text": text, "sort": value, "number": True}
    return {"text": str(value), "sort": str(value), "number": False}

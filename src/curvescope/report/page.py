"""From run folders to a page: figures embedded, tables sortable, settings folded away."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from curvescope import __version__
from curvescope.core.errors import UsageError
from curvescope.studies import STUDIES, folder


def write_page(runs: Sequence[str | Path], page: str | Path) -> Path:
    """Write one HTML file that shows every run; complete or not at all."""
    from jinja2 import Environment, select_autoescape

    if not runs:
        raise UsageError("expected at least one run folder, got none")
    template = (files("curvescope.report") / "page.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=select_autoescape(default=True), trim_blocks=True, lstrip_blocks=True
    )
    sections = [_section(Path(run)) for run in runs]
    html = environment.from_string(template).render(sections=sections, version=__version__)
    page = Path(page)
    partial = page.with_name(page.name + ".partial")
    partial.write_text(html, encoding="utf-8")
    partial.replace(page)
    return page


def _section(run: Path) -> dict[str, Any]:
    """What the template needs of one run."""
    config, result = folder.load(run)
    study = config.pop("study")
    captions = result.captions()
    env_file = run / "env.json"
    return {
        "study": study,
        "words": STUDIES[study],
        "model": Path(config.get("model", "")).name,
        "revision": config.get("revision", ""),
        "run": f"{run.parent.name}/{run.name}",
        "summary": result.summary(),
        "figures": [_figure(path, captions) for path in _in_order(run / "figures", captions)],
        "tables": [_table(name, frame, captions) for name, frame in result.tables().items()],
        "config": {key: value for key, value in config.items() if key != "version"},
        "env": json.loads(env_file.read_text(encoding="utf-8")) if env_file.exists() else {},
    }


def _in_order(folder: Path, captions: dict[str, str]) -> list[Path]:
    """Figures in the order of their captions, then those without one."""
    order = {name: i for i, name in enumerate(captions)}
    return sorted(folder.glob("*.svg"), key=lambda path: (order.get(path.stem, len(order)), path.stem))


def _figure(path: Path, captions: dict[str, str]) -> dict[str, str]:
    encoded = base64.b64encode(path.read_bytes()).decode("ascii")
    name = path.stem
    return {
        "name": name.replace("_", " "),
        "source": f"data:image/svg+xml;base64,{encoded}",
        "caption": captions.get(name, ""),
    }


def _table(name: str, frame: Any, captions: dict[str, str]) -> dict[str, Any]:
    rows = [[_cell(cell) for cell in row] for row in frame.to_numpy(dtype=object).tolist()]
    return {
        "name": name.replace("_", " "),
        "header": [str(column) for column in frame.columns],
        "rows": rows,
        "caption": captions.get(name, ""),
    }


def _cell(value: Any) -> dict[str, Any]:
    """Text, the number to sort by, and whether it is one."""
    if isinstance(value, bool):
        return {"text": "yes" if value else "no", "sort": int(value), "number": False}
    if isinstance(value, int | float):
        text = "–" if math.isnan(value) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
        return {"text": text, "sort": value, "number": True}
    return {"text": str(value), "sort": str(value), "number": False}

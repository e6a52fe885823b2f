"""Tables of a page that are tied to stored runs, each behind a line `<!-- marker -->`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def table_behind(page: str, marker: str) -> list[list[str]]:
    """The rows of the table behind a marker, without its heading; none where there is no table."""
    _, found, behind = page.partition(f"<!-- {marker} -->\n")
    assert found, f"the page has no marker {marker!r}"
    lines = re.match(r"\n*((?:\|.*\n)*)", behind)
    assert lines is not None
    rows = [line.strip("|").split(" | ") for line in lines[1].splitlines()[2:]]
    return [[cell.strip() for cell in row] for row in rows]


def stored(name: str) -> dict[str, Any]:
    """A stored run, empty where there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def claims_of(run: dict[str, Any]) -> list[list[str]]:
    """Its claims as rows of a table."""
    return [[c["claim"], c["measured"], c["verdict"]] for c in run.get("claims", [])]

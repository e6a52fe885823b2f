"""docs/compared.md: the numbers of its tables are those of stored results, rounded as on the page."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "compared.md").read_text(encoding="utf-8")
PEERS = {  # as the stored files call them, and as the page does
    "eigenthings": "hessian-eigenthings 1.0.0a5",
    "curvlinops": "curvlinops 3.0.1",
    "PyHessian": "PyHessian 0.1",
}


def rows(title: str) -> dict[str, list[str]]:
    """The table below a heading: first cell to the others, without the marks of what is best."""
    below = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\|(.*)\|$", below.replace("**", ""), flags=re.M)[2:]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert cells, f"no table below {title!r}"
    return {first: rest for first, *rest in cells}


def test_products_on_a_gpu_are_those_of_the_stored_run():
    with (RESULTS / "hvp-h200" / "costs.csv").open(encoding="utf-8") as file:
        costs = {row["contender"]: row for row in csv.DictReader(file)}

    def cells(contender: str) -> list[str]:
        row = costs.get(contender)
        return [f"{float(row['gradients']):.2f}", f"{float(row['peak_GiB']):.1f} GiB"] if row else ["–", "–"]

    found = rows("One product on a GPU")
    assert found.pop("curvescope 0.1.0") == cells("hessian") + cells("ggn")
    for name, shown in PEERS.items():
        assert found.pop(shown) == cells(name) + cells(f"{name} ggn")
    assert not found
    one = costs["gradient"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in (PAGE, readme):
        said = " ".join(page.split())
        assert f"takes {1000 * float(one['seconds']):.0f} ms and {float(one['peak_GiB']):.1f} GiB" in said
        assert "made when curvescope was at 0.1.0" in said
    for line in re.findall(r"^\| .* \|$", PAGE.partition("\n## ")[2].partition("\n## ")[0], flags=re.M):
        assert line in readme


@pytest.mark.parametrize(
    ("title", "file"), [("Memory of estimators", "estimators.md"), ("Their own tests", "peer-suites.md")]
)
def test_a_table_is_the_stored_one(title: str, file: str):
    stored = (RESULTS / file).read_text(encoding="utf-8")
    for first, rest in rows(title).items():
        assert f"| {' | '.join([first, *rest])} |" in stored


def short(x: float) -> str:
    """As `benchmarks/peers.py` writes numbers."""
    if x < 0.01:
        return f"{x:.0e}".replace("e-0", "e-")
    return f"{x:.0f}" if x >= 9.95 else f"{x:.1f}" if x >= 0.95 else f"{x:.2f}"


def test_products_on_a_cpu_are_those_of_the_stored_run():
    run = json.loads((RESULTS / "peers" / "peers.json").read_text(encoding="utf-8"))

    def cells(one: dict[str, Any]) -> list[str]:
        times = [one["seconds"].get(kind) for kind in ("hessian", "ggn")]
        spans = [f"{short(t['median'])} ({short(t['low'])}–{short(t['high'])})" if t else "–" for t in times]
        columns = short(one["seconds"]["columns"]["median"])
        return [
            *spans,
            columns,
            short(one["error"]["hessian"]),
            short(max(one["change"]["hessian"].values())),
        ]

    found = rows("One product on a CPU, and what a cut of the data changes")
    assert found == {one["name"]: cells(one) for one in run["libraries"]}
    performance = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for line in re.findall(r"^\| .* \|$", PAGE.partition("## One product on a CPU")[2], flags=re.M)[1:5]:
        assert line in performance

"""docs/compared.md: the numbers of its tables are those of stored results, rounded as on the page."""

from __future__ import annotations

import csv
import re
from pathlib import Path

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


@pytest.mark.parametrize(
    ("title", "file"), [("Memory of estimators", "estimators.md"), ("Their own tests", "peer-suites.md")]
)
def test_a_table_is_the_stored_one(title: str, file: str):
    stored = (RESULTS / file).read_text(encoding="utf-8")
    for first, rest in rows(title).items():
        assert f"| {' | '.join([first, *rest])} |" in stored

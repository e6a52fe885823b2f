"""Results of all figures of petrov2025, quick profile, with all that claims are computed from and no more.

Made from the folder of a reproduction, together with the table of docs/petrov2025.md:

    curvescope reproduce petrov2025 --out FOLDER
    python tests/petrov_results.py FOLDER

`full_hessian` was also run on MNIST, with `--figure full_hessian --set pictures=images:FOLDER OF MNIST`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from curvescope.papers import all_claims, figures_of
from curvescope.papers.folder import load_result
from curvescope.runs.study_result import Shown

DATA = Path(__file__).parent / "papers" / "data" / "petrov2025"
MNIST = DATA.with_name("petrov2025_mnist") / "full_hessian"
PAGE = Path(__file__).parents[1] / "docs" / "petrov2025.md"
COLUMNS = ("figure", "claim", "whose", "published", "measured", "verdict")
TABLE = re.compile(r"\| figure \| claim .*?\n(?=\n|\Z)", flags=re.S)
UNUSED = {"picture", "attention", "weights", "trained_weights"}  # of full_hessian: pixels and parameters


def load() -> dict[str, Shown]:
    """The results by figure, in the paper's order."""
    return {name: Shown.load(DATA / name) for name in figures_of("petrov2025")}


def markdown(results: dict[str, Shown]) -> str:
    """The table of the page."""
    return all_claims.markdown(all_claims.table(results), COLUMNS)


def mnist_markdown() -> str:
    """The table of the page that compares digits with MNIST."""
    measured = (Shown.load(DATA / "full_hessian").claims(), Shown.load(MNIST).claims())
    rows = ["| claim | digits | MNIST | measured on MNIST |", "| --- | --- | --- | --- |"]
    for digits, mnist in zip(*measured, strict=True):
        assert digits.claim == mnist.claim
        cells = (digits.claim, digits.verdict, mnist.verdict, mnist.measured)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def slim(result: Shown) -> Shown:
    """Without the large arrays of networks, which no claim reads."""
    networks = getattr(result, "networks", None)
    if networks is None:
        return result
    return replace(result, networks=[_slim(network) for network in networks])  # pyright: ignore[reportCallIssue]


def _slim(network):
    parts = {
        name: replace(
            part, **{f.name: np.zeros(0) for f in fields(part) if f.name in UNUSED - {"weights"}},
            **({"weights": np.zeros(0)} if name == "training" else {}),
        )
        for name in ("training", "initial", "trained")
        for part in [getattr(network, name)]
    }  # fmt: skip
    return replace(network, **parts)


def main(folder: Path) -> None:
    results = {name: load_result(folder, name) for name in figures_of("petrov2025")}
    for name, result in results.items():
        slim(result).save(DATA / name)
    page = PAGE.read_text(encoding="utf-8")
    claims = all_claims.table(results)
    assert len(TABLE.findall(page)) == 1
    page = TABLE.sub(lambda _: markdown(results), page)
    page = re.sub(r"^\d+ claims: .*\.$", all_claims.tally(claims) + ".", page, flags=re.M)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

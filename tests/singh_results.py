"""Results of all figures of singh2025, quick profile, with all that claims are computed from and no more.

Made from the folder of a reproduction, together with the table of docs/singh2025.md:

    curvescope reproduce singh2025 --out FOLDER
    python tests/singh_results.py FOLDER
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

from curvescope.papers import all_claims, figures_of
from curvescope.papers.folder import load_result
from curvescope.papers.singh2025.gap import FamilyGaps
from curvescope.runs.study_result import Shown

DATA = Path(__file__).parent / "papers" / "data" / "singh2025"
PAGE = Path(__file__).parents[1] / "docs" / "singh2025.md"
COLUMNS = ("figure", "claim", "whose", "published", "measured", "verdict")
TABLE = re.compile(r"\| figure \| claim .*?\n(?=\n|\Z)", flags=re.S)
TALLY = re.compile(r"^\d+ claims: .*\.$", flags=re.M)


def load() -> dict[str, Shown]:
    """The results by figure, in the order of the slides."""
    return {name: Shown.load(DATA / name) for name in figures_of("singh2025")}


def markdown(results: dict[str, Shown]) -> str:
    """The table of the page."""
    return all_claims.markdown(all_claims.table(results), COLUMNS)


def slim(result: Shown) -> Shown:
    """Without densities, whose distances are stored beside them."""
    if not isinstance(result, FamilyGaps):
        return result
    courses = {
        name: replace(one, pairs={step: replace(pair, densities={}) for step, pair in one.pairs.items()})
        for name, one in result.courses.items()
    }
    own = {name: replace(pair, densities={}) for name, pair in result.bundled.pairs.items()}
    return replace(result, courses=courses, bundled=replace(result.bundled, pairs=own))


def main(folder: Path) -> None:
    """Store the results, and write the table of the page."""
    results = {name: load_result(folder, name) for name in figures_of("singh2025")}
    for name, result in results.items():
        slim(result).save(DATA / name)
    page = PAGE.read_text(encoding="utf-8")
    assert len(TABLE.findall(page)) == len(TALLY.findall(page)) == 1
    page = TABLE.sub(lambda _: markdown(results), page)
    page = TALLY.sub(lambda _: all_claims.tally(all_claims.table(results)) + ".", page)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

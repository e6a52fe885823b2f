"""docs/conventions.md: what is promised is short, and its table of coverage is the measured one."""

from __future__ import annotations

import re
from pathlib import Path

from curvescope.algorithms.estimates.intervals import student

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "conventions.md").read_text(encoding="utf-8")


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_the_guarantee_takes_five_lines():
    engines = PAGE.split("## Engines")[1].split("\n## ")[0]
    promised = engines.split("change between products:")[1].strip().splitlines()
    assert len(promised) == 5
    assert all(re.match(r"- \*\*[\w ]+\*\*: ", line) for line in promised)


def test_the_table_of_coverage_is_the_measured_one():
    measured = (ROOT / "benchmarks" / "results" / "coverage.md").read_text(encoding="utf-8")
    assert rows(PAGE.split("## Intervals")[1].split("\n## ")[0]) == rows(measured)


def test_the_quantiles_that_are_named():
    for degrees, said in ((1, "12.7"), (9, "2.3")):
        assert f"{student(degrees):.1f}" == said
        assert said in PAGE

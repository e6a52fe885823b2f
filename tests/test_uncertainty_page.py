"""docs/uncertainty.md: the one meaning of ±, compared with outputs, and linked by the other pages."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import guides
from curvescope.algorithms.estimates.trace import TraceEstimate
from curvescope.core.number_format import with_error
from curvescope.sampling.statistics import Sampled

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "uncertainty.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")]


def number(sampling=3.0, low=93.0, high=107.0, value=100.0):
    """A number with both errors."""
    trend = np.array([value, value, value])
    return Sampled("λ_max", value, 1.0, sampling, low, high, 16, 1, 512.0, trend, np.zeros(16))


def row(start: str) -> str:
    """The row of an output."""
    (found,) = [line for line in ROWS if line.startswith(f"| {start}")]
    return found


def test_the_page_gives_what_it_says():
    guides.run("uncertainty.md")


def test_a_settled_headline_has_one_standard_error_of_both_errors_together():
    settled = number()
    assert settled.settled()
    assert settled.stderr == pytest.approx(math.hypot(settled.numerical, settled.sampling))
    assert settled.headline == with_error(settled.value, settled.stderr)
    assert " ± " in settled.headline
    assert "± is one standard error" in row("headline (command")
    for word in ("numerical", "sampling"):
        assert f"{word} {getattr(settled, word):.2g}" in settled.words
        assert f"`{word} " in row("headline (command")
    assert "(95 %)" in settled.words
    assert "low to high (95 %)" in row("headline (command")


def test_an_unsettled_headline_has_no_error_behind_it():
    open_ = number(sampling=30.0, low=50.0, high=200.0)
    assert not open_.settled()
    assert "±" not in open_.headline
    assert open_.headline.startswith("about ")
    assert "about 2,000" in row("headline that is not settled")
    assert open_.words.startswith("not settled")


def test_columns_and_fields_are_those_of_the_page():
    names = set(re.findall(r"`(x\w*)`", row("CSV columns and JSON")))
    assert set(number().columns("x")) - {"x"} == names
    named = set(re.findall(r"`(\w+)`", row("fields in Python (`Sampled`)"))) - {"Sampled"}
    there = {field.name for field in fields(Sampled)} | {"stderr"}
    assert named <= there
    assert {field.name for field in fields(TraceEstimate)} >= {"stderr", "low", "high"}
    assert "`stderr`" in row("fields in Python (estimates")


def test_every_page_that_explains_the_symbol_links_to_this_one():
    explains = re.compile(
        r"±[^|\n]{0,40}(is|are) (the |a |one |an )?(numerical|standard|bound)|behind ±|what ± ", re.I
    )
    pages = [path for path in DOCS.rglob("*.md") if path.name not in ("uncertainty.md", "glossary.md")]
    found = [path for path in pages if explains.search(path.read_text(encoding="utf-8"))]
    assert {path.name for path in found} >= {"conventions.md", "error_bars.md", "probes.md"}
    missing = [path.name for path in found if "uncertainty.md" not in path.read_text(encoding="utf-8")]
    assert not missing
    assert "docs/uncertainty.md" in (DOCS / "glossary.md").read_text(encoding="utf-8")

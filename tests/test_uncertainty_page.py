"""docs/uncertainty.md: the one meaning of ±, compared with outputs, and linked by the other pages."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import guides
from curvescope.algorithms.estimates.trace import TraceEstimate
from curvescope.core.number_format import rounded, with_error
from curvescope.report import write_page
from curvescope.sampling.statistics import Sampled
from curvescope.studies import run_study

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


MODEL = """
n_layers = 1
d_model = 4
n_heads = 1
d_ff = 4
vocab_size = 3
n_ctx = 11
init = "scaled"
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A run folder, its result, and the number of its sharpest block."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "small.toml").write_text(MODEL, encoding="utf-8")
    settings = {"model": str(folder / "small.toml"), "data": "task:sorting", "operators": ["hessian"]}
    settings |= {"num_trace_probes": 4, "num_norm_probes": 2, "num_small_probes": 2, "num_sharp_steps": 4}
    path, result = run_study.run("blocks", settings, out=folder)
    part = result.parts["hessian"]
    name = part.ranking()[0]
    assert part.sampled_blocks[name].sampling > 0
    return path, result, name


def stored(path: Path, *keys: str) -> dict:
    """Fields of a number in `result.json`."""
    tree = json.loads((path / "result.json").read_text(encoding="utf-8"))["fields"]["parts"]["hessian"]
    for key in keys:
        tree = tree["fields"][key] if "fields" in tree else tree[key]
    return tree["fields"]


def test_json_and_csv_have_the_errors_under_the_names_of_the_page(measured):
    path, _, name = measured
    fields_of = stored(path, "sampled_blocks", name)
    named = set(re.findall(r"`(x_\w*)`", row("CSV columns and JSON"))) - {"x_verdict"}
    assert len(named) == 4
    with (path / "tables" / "hessian.csv").open(encoding="utf-8") as file:
        line = next(line for line in csv.DictReader(file) if line["block"] == name)
    for column in named - {"x_numerical"}:  # the residual of the row is that of the block's own steps
        key = column.removeprefix("x_")
        assert float(line[f"lambda_max_{key}"]) == pytest.approx(fields_of[key])
    assert float(line["lambda_max_numerical"]) >= 0


def test_the_command_line_and_the_report_show_the_same_number_with_both_errors(measured, tmp_path):
    path, result, _ = measured
    whole = stored(path, "sampled", "lambda_max")
    expected = f"numerical {rounded(whole['numerical'], 2)}, sampling {rounded(whole['sampling'], 2)}"
    label, value, words = next(line for line in result.summary() if line[0].startswith("λ_max"))
    assert expected in words
    number = result.parts["hessian"].sampled["lambda_max"]
    assert value == number.headline
    assert (" ± " in value) == number.settled()
    page = write_page([path], tmp_path / "page.html").read_text(encoding="utf-8")
    for part in (label, value, expected):
        assert part in page


def test_thin_bars_of_a_figure_end_at_the_interval_of_both_errors(measured):
    path, result, name = measured
    whole = stored(path, "sampled_blocks", name)
    ax = result.figures()["sharpness"].axes[0]
    thin, thick = (bar.lines[2][0] for bar in ax.containers[:2])
    assert thin.get_linewidths()[0] < thick.get_linewidths()[0]
    ends = thin.get_segments()[0][:, 1]
    assert ends == pytest.approx([whole["low"], whole["high"]])
    assert "thin outer bar" in row("figures")


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

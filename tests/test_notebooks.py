"""notebooks/: every script runs from top to bottom and becomes a notebook that shows what it measured."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from curvescope.papers import PAPERS
from curvescope.papers.ormaniec2025.growth_sweeps import EXPERIMENTS
from curvescope.viz.notebook import LIMIT

for package in ("jupytext", "nbformat", "nbclient", "ipykernel"):
    pytest.importorskip(package, reason="the extra dev brings it")
import jupytext  # noqa: E402
import nbformat  # noqa: E402
from nbclient.exceptions import CellExecutionError  # noqa: E402

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.py"))
FAST = ("tour", "molina2023")  # the others take many seconds, for what other tests run too
MEGABYTE = 1_000_000
build = runpy.run_path(str(ROOT / "scripts" / "build_notebooks.py"))["build"]


def test_there_is_a_tour_and_a_notebook_for_every_paper():
    assert sorted(["tour", *PAPERS]) == SCRIPTS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in SCRIPTS]
)
def test_a_notebook_runs_and_every_cell_of_code_shows_something(name):
    check(build(ROOT / "notebooks" / f"{name}.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_stored_notebook_is_that_of_its_script(name):
    stored = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    check(stored)
    script = jupytext.read(ROOT / "notebooks" / f"{name}.py")
    assert [(cell.cell_type, cell.source) for cell in stored.cells] == [
        (cell.cell_type, cell.source) for cell in script.cells
    ]


def test_the_notebook_of_ormaniec2025_has_every_figure_of_the_authors_notebook():
    """A heat map, two histograms, and a figure for each of the sweeps."""
    stored = nbformat.read(ROOT / "notebooks" / "ormaniec2025.ipynb", as_version=4)
    outputs = [out for cell in stored.cells for out in cell.get("outputs", [])]
    shown = "".join(out.data.get("text/html", "") for out in outputs if "data" in out)
    drawn = set(re.findall('<img src="data:image/png;base64,[^"]+" alt="([^"]+)"', shown))
    assert drawn == {"histogram_classical", "histogram_linear", *EXPERIMENTS}
    assert sum("image/jpeg" in out.get("data", {}) for out in outputs) == 1


def check(made: nbformat.NotebookNode) -> None:
    """Assert that a notebook is valid and light, and that each cell of code shows something."""
    nbformat.validate(made)
    assert made.cells[0].cell_type == "markdown"
    assert made.cells[0].source.startswith("# ")
    for cell in made.cells:
        assert cell.cell_type == "markdown" or cell.outputs, cell.source
    outputs = [out for cell in made.cells for out in cell.get("outputs", [])]
    assert not [out for out in outputs if out.output_type == "error" or out.get("name") == "stderr"]
    boxes = [out.data["text/html"] for out in outputs if "text/html" in out.get("data", {})]
    assert any('src="data:image/' in box for box in boxes)
    assert max(map(len, boxes)) < LIMIT
    assert len(json.dumps(made, allow_nan=False)) < MEGABYTE


def written(folder: Path, text: str) -> Path:
    script = folder / "small.py"
    script.write_text(text, encoding="utf-8")
    return script


def test_the_same_script_gives_the_same_file(tmp_path):
    script = written(tmp_path, "# %% [markdown]\n# # Small\n\n# %%\nprint('hi')\n'value'\n")
    made = build(script)
    assert made == build(script)
    text, code = made.cells
    assert text.source == "# Small"
    printed, value = code.outputs
    assert printed.text == "hi\n"
    assert value.data == {"text/plain": "'value'"}


def test_an_error_in_a_cell_is_not_swallowed(tmp_path):
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        build(written(tmp_path, "# %%\n1 / 0\n"))

"""notebooks/: every script runs from top to bottom and becomes a notebook that shows what it measured."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from curvescope.papers import PAPERS
from curvescope.viz.notebook import LIMIT

for package in ("jupytext", "nbformat", "nbclient", "ipykernel"):
    pytest.importorskip(package, reason="the extra dev brings it")
import nbformat  # noqa: E402
from nbclient.exceptions import CellExecutionError  # noqa: E402

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.py"))
DEAR = ("singh2025", "petrov2025")  # seconds each, of what other tests run too
build = runpy.run_path(str(ROOT / "scripts" / "build_notebooks.py"))["build"]


def test_there_is_a_tour_and_a_notebook_for_every_paper():
    assert sorted(["tour", *PAPERS]) == SCRIPTS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in DEAR else []) for name in SCRIPTS]
)
def test_a_notebook_runs_and_every_cell_of_code_shows_something(name):
    made = build(ROOT / "notebooks" / f"{name}.py")
    nbformat.validate(made)
    assert made.cells[0].cell_type == "markdown"
    assert made.cells[0].source.startswith("# ")
    for cell in made.cells:
        assert cell.cell_type == "markdown" or cell.outputs, cell.source
    outputs = [out for cell in made.cells for out in cell.get("outputs", [])]
    assert not [out.text for out in outputs if out.get("name") == "stderr"]
    boxes = [out.data["text/html"] for out in outputs if "text/html" in out.get("data", {})]
    assert any('src="data:image/' in box for box in boxes)
    assert max(map(len, boxes)) < LIMIT
    assert len(json.dumps(made, allow_nan=False)) < 10 * LIMIT


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

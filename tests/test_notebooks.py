"""notebooks/: every script runs from top to bottom and becomes a notebook that shows what it measured."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from curvescope.core.notebook import LIMIT
from curvescope.papers import PAPERS

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.py"))
DEAR = ("singh2025", "petrov2025")  # seconds each, of what other tests run too


def _builder():
    spec = importlib.util.spec_from_file_location("build_notebooks", ROOT / "scripts/build_notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


builder = _builder()


def test_there_is_a_tour_and_a_notebook_for_every_paper():
    assert sorted(["tour", *PAPERS]) == SCRIPTS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in DEAR else []) for name in SCRIPTS]
)
def test_a_notebook_runs_and_every_cell_of_code_shows_something(name):
    made = builder.build(ROOT / "notebooks" / f"{name}.py")
    cells = made["cells"]
    assert cells[0]["cell_type"] == "markdown"
    assert cells[0]["source"].startswith("# ")
    for cell in cells:
        assert cell["cell_type"] == "markdown" or cell["outputs"], cell["source"]
    boxes = [
        out["data"]["text/html"]
        for cell in cells
        for out in cell.get("outputs", [])
        if "text/html" in out.get("data", {})
    ]
    assert any('src="data:image/' in box for box in boxes)
    assert max(map(len, boxes)) < LIMIT
    assert len(json.dumps(made, allow_nan=False)) < 10 * LIMIT


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_cells_that_parse(name):
    cells = builder.read_cells((ROOT / "notebooks" / f"{name}.py").read_text(encoding="utf-8"))
    for cell in cells:
        assert cell.source
        if cell.kind == "code":
            compile(cell.source, name, "exec")


def test_cells_are_cut_at_their_marks():
    text = "# %% [markdown]\n# # Title\n#\n# words\n\n# %%\nx = 1\nx\n"
    assert builder.read_cells(text) == [("markdown", "# Title\n\nwords"), ("code", "x = 1\nx")]


def test_a_cell_gives_what_it_prints_and_what_its_last_line_is_worth():
    names = {}
    assert builder.run_cell("x = 2\nprint('a')\nx + 1", names) == ("a\n", 3)
    assert builder.run_cell("y = x", names) == ("", None)
    assert builder.outputs("", None, 1) == []


def test_an_error_in_a_cell_is_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        builder.run_cell("1 / 0", {})


def test_the_file_is_one_that_jupyter_reads(tmp_path):
    script = tmp_path / "small.py"
    script.write_text("# %% [markdown]\n# # Small\n\n# %%\nprint('hi')\n'value'\n", encoding="utf-8")
    made = builder.build(script)
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])
    printed, value = made["cells"][1]["outputs"]
    assert printed == {"output_type": "stream", "name": "stdout", "text": "hi\n"}
    assert value["data"] == {"text/plain": "'value'"}
    assert set(made["cells"][1]) == {"cell_type", "id", "metadata", "source", "execution_count", "outputs"}

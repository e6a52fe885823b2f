"""docs/taylor.md: its code runs, and its tables and figures are those of the study."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

from curvescope.studies.taylor import view

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "taylor.md").read_text(encoding="utf-8")


def test_the_examples_run():
    mpl.use("Agg")
    space: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        exec(compile(code, "docs/taylor.md", "exec"), space)
    assert space["line"].direction == "−∇L, steepest descent"
    assert set(space["frame"]["quadratic_holds"]) <= {"holds", "fails", "below rounding"}
    assert (space["between"].t.min(), space["between"].t.max()) == (-0.25, 1.25)
    assert space["queries"].length == pytest.approx(1.0, rel=1e-5)
    assert space["plane"].loss.shape == (5, 5)
    assert space["filters"].lengths[0] == pytest.approx(space["filters"].lengths[1], rel=1e-5)
    assert space["predicted"].change.shape == (2, 6)
    import matplotlib.pyplot as plt

    plt.close("all")


def test_the_tables_it_names_have_captions():
    source = Path(view.__file__).read_text(encoding="utf-8")
    for name in re.findall(r"`(\w+)\.csv`", PAGE):
        assert f'"{name}": ' in source or f'["{name}"]' in source, name


def test_its_figures_are_there():
    shown = re.findall(r"\]\((images/[\w-]+\.png)\)", PAGE)
    assert len(shown) == 3
    assert all((DOCS / name).exists() for name in shown)

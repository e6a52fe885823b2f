"""docs/theory/landscape.md: its code runs, and its tables are those of the study."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from curvescope.studies.landscape import view

PAGE = (Path(__file__).parent.parent / "docs" / "theory" / "landscape.md").read_text(encoding="utf-8")


def test_the_examples_run():
    space: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        exec(compile(code, "docs/theory/landscape.md", "exec"), space)
    assert space["norms"].shape == space["traces"].values.shape == (4,)
    assert not space["traces"].exact
    assert space["mean"] == pytest.approx(space["problem"].loss_value(), rel=1e-5)


def test_the_tables_it_names_have_captions():
    source = Path(view.__file__).read_text(encoding="utf-8")
    for name in re.findall(r"`(\w+)\.csv`", PAGE):
        assert f'"{name}": ' in source, name

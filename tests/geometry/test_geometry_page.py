"""The code of docs/geometry.md runs as it stands; files and options that it lists are there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import curvescope
from curvescope import geometry

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "geometry.md").read_text(encoding="utf-8")


def test_the_examples_run_one_after_the_other():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    assert len(blocks) == 4
    space: dict[str, object] = {}
    for number, code in enumerate(blocks):
        exec(compile(code, f"docs/geometry.md, block {number}", "exec"), space)


def test_the_table_lists_every_file_of_the_folder():
    folder = Path(inspect.getfile(geometry)).parent
    listed = set(re.findall(r"^\| `(\w+(?:\.py|/))` \|", PAGE, flags=re.M))
    names = {p.name for p in folder.iterdir() if p.suffix == ".py" and p.stem != "__init__"}
    names |= {f"{p.parent.name}/" for p in folder.glob("*/__init__.py")}
    assert listed == names


def test_options_that_are_named_exist():
    for line in re.findall(r"((?:`\w+=[^`]+`(?:, | and )?\s*)+) ?of\s+`(\w+)`", PAGE):
        names = re.findall(r"`(\w+)=", line[0])
        known = inspect.signature(getattr(geometry, line[1])).parameters
        assert names
        assert set(names) <= set(known), line
    assert (Path(curvescope.__file__).parent / "studies/traveling_words.py").exists()

"""docs/guides/influence.md: its code runs, its command too, and its table is that of the stored run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from commands import call
from curvescope.studies.influence import view

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "guides" / "influence.md").read_text(encoding="utf-8")


def test_the_example_runs():
    space: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        exec(compile(code, "docs/guides/influence.md", "exec"), space)
    found = space["found"]
    assert found.values.shape == found.error.shape == (2, 8)
    assert found.converged.all()
    assert (np.diff(found.values[0][space["order"]]) <= 0).all()


def test_its_table_is_that_of_the_stored_run():
    """`benchmarks/results/influence/default.json` has the claims of one run with the default settings."""
    stored = json.loads((ROOT / "benchmarks/results/influence/default.json").read_text(encoding="utf-8"))
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (holds|fails|not decided) \|$", PAGE, flags=re.M)
    assert rows == [(claim["claim"], claim["measured"], claim["verdict"]) for claim in stored["claims"]]


def test_the_tables_it_names_have_captions():
    source = Path(view.__file__).read_text(encoding="utf-8")
    for name in re.findall(r"`(\w+)\.csv`", PAGE):
        assert f'"{name}": ' in source or f'["{name}"]' in source, name


def test_its_figure_is_there():
    shown = re.findall(r"\]\(\.\./(images/[\w-]+\.png)\)", PAGE)
    assert shown
    assert all((ROOT / "docs" / name).exists() for name in shown)


def test_the_command_asks_about_a_text(tmp_path, capsys, undrawn):
    asked = ["--query", "def run=>(self)", "--blocks", "L3.b_O", "--tokens", "32", "--tables"]
    less = ["--set", "cases=[]", "--set", "other_dampings=[]", "--set", "num_probes=2"]
    code, out, err = call("run", "influence", *asked, *less, "--out", tmp_path, capsys=capsys)
    assert code == 0, err
    assert re.search(r"query 1 +loss \d", out)
    assert "def run=>(self)" in out
    assert re.search(r"(helped|harmed) +[+-]\d\.\d\de[+-]\d\d ± ", out)
    code, _, err = call("run", "spectrum", "--query", "words", "--out", tmp_path, capsys=capsys)
    assert code
    assert "no such option --query" in err

"""docs/estimators.md: its code runs, and its figures are those that come out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "estimators.md").read_text(encoding="utf-8")


def test_the_examples_run_and_give_what_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        exec(compile(code, "docs/estimators.md", "exec"), space)
    printed = capsys.readouterr().out
    for said in re.findall(r"# ([\d,]+ reverse passes, by \w+)", PAGE):
        assert said in printed
    rows = re.findall(r"^\| (trace|diagonal), (\S+) \| ([\d.]+) \|$", PAGE, flags=re.M)
    assert {(what, method) for what, method, _ in rows} == space["errors"].keys()
    for what, method, figure in rows:
        assert space["errors"][what, method] == pytest.approx(float(figure), rel=0.1)
    held = (space["low"] <= space["right"]) & (space["right"] <= space["high"])
    assert held.float().mean() > 0.85
    assert space["narrow"].num_products == space["rho"].num_products
    assert (tmp_path / "density.svg").stat().st_size > 0

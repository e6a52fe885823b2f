"""docs/kfac.md: its code runs, and its tables are those of the benchmark."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from curvescope.operators import KFACQuality

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "kfac.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results" / "kfac"


def test_the_examples_run():
    space: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        exec(compile(code, "docs/kfac.md", "exec"), space)
    assert (space["A"].shape, space["B"].shape) == ((97, 97), (96, 96))
    assert float(space["step"] @ space["problem"].gradient("L3.[Wb]_*")) > 0
    assert space["P"].psd
    assert space["found"].layers == ["L3.b_V", "L3.b_O"]


@pytest.mark.parametrize("name", ["tiny-gpt", "stories260K"])
def test_its_tables_are_the_saved_ones(name: str):
    found = KFACQuality.load(RESULTS / name)
    table = (RESULTS / name / "table.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| L.*$", table, flags=re.M):
        assert row in PAGE
    for layer, error in zip(found.layers, found.error_ggn[0], strict=True):
        assert f"| {layer} | {error:.3f} |" in PAGE

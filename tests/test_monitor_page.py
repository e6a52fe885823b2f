"""docs/monitor.md: its code runs, and its columns are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from curvescope.monitor.columns import COLUMNS, TEXT

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "monitor.md").read_text(encoding="utf-8")


def test_the_examples_run(tmp_path):
    space: dict[str, Any] = {"folder": tmp_path / "run"}
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        exec(compile(code, "docs/monitor.md", "exec"), space)
    assert space["history"]["step"].tolist() == [0, 4]
    assert space["page"].exists()


def test_columns_that_are_named_are_there():
    table = PAGE[PAGE.index("| column |") : PAGE.index("The threshold is")]
    named = re.findall(
        r"`([a-z_]+)`", "".join(line.split("|")[1] for line in table.splitlines() if "|" in line)
    )
    assert set(named) <= {*COLUMNS, TEXT}

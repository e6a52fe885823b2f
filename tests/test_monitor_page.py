"""docs/monitor.md: its code runs, and its columns are there."""

from __future__ import annotations

import json
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


def test_what_was_measured_is_what_the_page_says():
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and "| equal |" in line]
    for case, row in zip(("small-cpu", "tiny-gpt-cpu", "stories15M-gpu"), rows, strict=True):
        file = ROOT / "benchmarks" / "results" / "monitor" / f"{case}.json"
        found = json.loads(file.read_text(encoding="utf-8"))
        bits, share, accuracy = found["bits"], found["share"], found["accuracy"]
        assert all([bits["weights"], bits["random_states"], bits["control"]["weights"]])
        numbers = [
            f"{100 * share['largest_share_behind_a_later_measurement']:.1f} %",
            f"{100 * accuracy['largest_error']:.2f} %",
            f"{accuracy['call_products_warm_over_cold']['median']:.2f}",
            f"{accuracy['call_seconds_warm_over_cold']['median']:.2f}",
        ]
        assert [cell.strip() for cell in row.split("|")][3:-1] == numbers

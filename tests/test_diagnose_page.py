"""docs/diagnose.md: its code runs, its limits are those of the checks, its tables are measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from curvescope.studies.diagnose import checks
from curvescope.studies.diagnose.checks import CHECKS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "diagnose.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results" / "diagnosis"
LIMITS = {
    "negative_curvature": f"{checks.NEGATIVE:g}",
    "condition": f"{checks.CONDITION:g}",
    "confidence": f"{checks.CONFIDENT:g}",
    "uneven_layers": f"{checks.UNEVEN:g}",
    "flat_blocks": f"below {checks.FLAT:g}",
    "norm_placement": f"{checks.GROWTH:g}",
    "embedding_scale": f"{checks.EMBEDDED_HIGH:g}, or below {checks.EMBEDDED_LOW:g}",
    "sharp_sequences": f"{checks.SHARP:g}",
    "steep_sequences": f"{checks.STEEP:g}",
    "duplicates": f"{checks.COPIES:g}",
    "batch_choice": f"{checks.BATCH:g}",
    "saturated_attention": f"{checks.SATURATED:g}",
    "sinks": f"{checks.MASS:g}",
    "dead_heads": f"{checks.DEAD:g}",
    "learning_rate": f"{checks.RATE:g}",
    "block_learning_rate": f"{checks.RATE:g}",
}


def rows(name: str) -> list[dict[str, Any]]:
    lines = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_the_limits_are_those_of_the_checks():
    told = dict(
        re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| (?:fault|warning|note) \|$", PAGE, flags=re.M)
    )
    assert set(told) == set(CHECKS) == set(LIMITS)
    written = {name: limit.replace("0.0001", f"{checks.FLAT:g}") for name, limit in told.items()}
    assert written == LIMITS


def test_the_table_of_hits_is_what_was_measured():
    planted = [row for row in rows("validation") if row["kind"] == "planted"]
    told = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| `(\w+)` \| (\d+) of (\d+) \| (\d+) of \d+ \|$", PAGE, flags=re.M
    )
    assert {case for case, *_ in told} == {row["case"] for row in planted}
    for case, check, found, total, anyhow in told:
        own = [row for row in planted if row["case"] == case]
        assert int(total) == len({row["seed"] for row in own}) == len(own)
        assert int(found) == sum(check in row["found"] for row in own)
        assert int(anyhow) == sum(bool(row["found"]) for row in own)


def test_the_table_of_false_alarms_is_what_was_measured():
    healthy = [row for row in rows("validation") if row["kind"] == "healthy"]
    told = dict(re.findall(r"^\| ([a-z][^|`]*) \| (\d+ of \d+) \| [^|]*\|$", PAGE, flags=re.M))
    assert set(told) == {row["case"] for row in healthy} | {"all"}
    for case, words in told.items():
        own = [row for row in healthy if case in ("all", row["case"])]
        assert words == f"{sum(bool(row['found']) for row in own)} of {len(own)}"


def test_limits_lie_beyond_what_healthy_models_have():
    calibrating = rows("calibration")
    assert {row["seed"] for row in calibrating}.isdisjoint(row["seed"] for row in rows("validation"))
    told = re.findall(r"^\| `(\w+)` \| ([\d.e-]+) \| [^|]+ \|$", PAGE, flags=re.M)
    assert told
    for name, value in told:
        values = [row["values"][name][0] for row in calibrating if name in row["values"]]
        farthest = min(values) if name == "flat_blocks" else max(values)
        assert float(value) == pytest.approx(farthest, rel=0.01)
    assert all(not row["found"] for row in calibrating)


def test_the_examples_run():
    space: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        exec(compile(code, "docs/diagnose.md", "exec"), space)
    assert space["worst"].name == "learning_rate"
    assert space["worst"].severity == "fault"

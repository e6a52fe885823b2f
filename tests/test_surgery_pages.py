"""docs/guides/pruning.md and quantizing.md: their code runs, their tables are the stored verdicts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import curvescope as cs
from stored_tables import claims_of, stored, table_behind

ROOT = Path(__file__).parent.parent
PAGES = {
    "prune": ROOT / "docs" / "guides" / "pruning.md",
    "quantize": ROOT / "docs" / "guides" / "quantizing.md",
}


def run_code(name: str) -> dict[str, Any]:
    space: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGES[name].read_text(encoding="utf-8"), flags=re.S):
        exec(compile(code, str(PAGES[name]), "exec"), space)
    return space


def test_half_of_a_block_is_removed_as_predicted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run_code("prune")
    assert int((found["w"] + found["found"].delta == 0).sum()) == 48
    assert (found["made_up"] <= found["alone"] * (1 + 1e-9) + found["shift"] * found["w"] ** 2 / 2).all()
    assert found["measured"] == pytest.approx(found["predicted"], rel=0.2)
    assert found["plain"] > found["measured"]
    again = cs.load("pruned", dtype="float64")
    torch.testing.assert_close(again.get_parameter("L3.b_O").detach(), found["w"] + found["found"].delta)
    assert int((again.get_parameter("L3.b_O") == 0).sum()) == 48


def test_rounding_comes_out_as_predicted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run_code("quantize")
    for name in ("nearest", "made up"):
        assert found["measured"][name] == pytest.approx(found["predicted"][name], rel=0.5)
    assert found["nearest"].unique().numel() <= 7 * 96
    again = cs.load("rounded", dtype="float64")
    torch.testing.assert_close(again.get_parameter("L2.W_2").detach(), found["made_up"])
    whole = found["made_up"] / found["points"].step
    torch.testing.assert_close(whole, whole.round())


@pytest.mark.parametrize("name", PAGES)
def test_tables_are_the_stored_verdicts(name):
    """`benchmarks/results/surgery/` holds the claims of a run with the default settings, and over models."""
    page = PAGES[name].read_text(encoding="utf-8")
    rows = table_behind(page, "claims")
    assert rows
    assert rows == claims_of(stored(f"surgery/{name}"))
    assert table_behind(page, "over models") == claims_of(stored(f"surgery/{name}-full"))

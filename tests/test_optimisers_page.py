"""docs/guides/optimisers.md: its code runs, steps cost what it says, its tables are stored ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from curvescope import optim

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "guides" / "optimisers.md").read_text(encoding="utf-8")
STORED = ROOT / "benchmarks" / "results" / "optimisers" / "default.json"


@pytest.fixture(scope="module")
def space() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        exec(compile(code, "docs/guides/optimisers.md", "exec"), found)
    return found


def test_the_examples_do_what_they_say(space):
    assert space["losses"][-1] < 0.2 * space["losses"][0]
    assert space["after"][-1] < space["after"][0]
    assert [group["lr"] for group in space["again"].param_groups] == [3e-3, 1e-3]
    expected = [(1 - value / 50) ** 10 for value in (1, 2, 50)]
    assert space["w"].tolist() == pytest.approx(expected, abs=1e-12)


def test_every_optimiser_is_in_the_table():
    listed = re.findall(r"^\| `(\w+)` \| .+ \| .*loss.* \| .* \|$", PAGE, flags=re.M)
    assert set(listed) == set(optim.__all__) - {"CurvatureOptimizer"}


@pytest.mark.parametrize(
    ("make", "least", "rest"),
    [
        (lambda p: optim.NewtonCG(p, max_products=3), (2, 1), (2, 1)),
        (lambda p: optim.SharpnessGD(p, every=9), (1, 1), (1, 1)),
        (lambda p: optim.BlockSGD(p, every=9), (1, 1), (1, 1)),
        (lambda p: optim.HutchinsonAdam(p, every=9), (1, 1), (1, 1)),
        (lambda p: optim.ClippedNewton(p, estimate="bartlett"), (1, 2), (1, 1)),
        (lambda p: optim.KFACDescent(p), (3, 2), (1, 1)),
    ],
)
def test_steps_cost_what_the_table_says(space, make, least, rest):
    """Losses and gradients of a step with curvature, and of one without."""
    opt = make(space["net"].parameters())
    for losses, gradients in (least, rest):
        before = opt.work
        opt.step(space["loss"].problem)
        spent = {name: count - before[name] for name, count in opt.work.items()}
        assert (spent["losses"], spent["gradients"]) == (losses, gradients)
    if not isinstance(opt, optim.NewtonCG):
        assert spent["products"] == spent["block_products"] == 0


def test_tables_are_those_of_the_stored_run():
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    rows = re.findall(r"^\| (\S.*?) \| (.+?) \| (holds|fails|not decided) \|$", PAGE, flags=re.M)
    assert rows == [(c["claim"], c["measured"], c["verdict"]) for c in stored["claims"]]
    for row in stored["ends"]:
        loss = f"{row['loss']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        assert f"| {row['arena']} | {row['optimiser']} | {row['lr']:g} | {loss} |" in PAGE

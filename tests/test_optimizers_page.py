"""docs/guides/optimizers.md: its code runs, steps cost what it says, its tables are stored ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from curvescope import optim
from stored_tables import claims_of, stored, table_behind

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "guides" / "optimizers.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def space() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        exec(compile(code, "docs/guides/optimizers.md", "exec"), found)
    return found


def test_the_examples_do_what_they_say(space):
    assert space["losses"][-1] < 0.2 * space["losses"][0]
    assert space["after"][-1] < space["after"][0]
    assert [group["lr"] for group in space["again"].param_groups] == [3e-3, 1e-3]
    expected = [(1 - value / 50) ** 10 for value in (1, 2, 50)]
    assert space["w"].tolist() == pytest.approx(expected, abs=1e-12)


def test_every_optimizer_is_in_the_table():
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


@pytest.mark.parametrize("profile", ["default", "full"])
def test_tables_are_those_of_the_stored_run(profile):
    run = stored(f"optimizers/{profile}")
    assert run or profile == "full"
    assert table_behind(PAGE, f"{profile}: claims") == claims_of(run)
    rows = table_behind(PAGE, f"{profile}: ends")
    assert len(rows) == len(run.get("ends", []))
    for row, end in zip(rows, run.get("ends", []), strict=True):
        lr = f"{end['lr']:g}{', the last tried' if end['at_edge'] else ''}"
        loss = f"{end['loss']:.3f} [{end['low']:.3f}, {end['high']:.3f}]"
        assert row[:4] == [end["arena"], end["optimizer"], lr, loss]


def test_the_best_rates_of_the_stored_run_are_no_ends():
    """Every chosen rate was tried at the whole budget beside a smaller and a larger one."""
    run = stored("optimizers/default")
    for end in run["ends"]:
        tried = [
            t["lr"]
            for t in run["trials"]
            if (t["arena"], t["optimizer"], t["budget"]) == (end["arena"], end["optimizer"], 1.0)
        ]
        assert (min(tried) < end["lr"] < max(tried)) != end["at_edge"]

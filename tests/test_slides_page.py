"""docs/slides.md: its code runs, and its sentences about what comes out are true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "slides.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def space() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        exec(compile(code, "docs/slides.md", "exec"), found)
    return found


@pytest.mark.slow
def test_the_loss_comes_back_near_twice_over_the_curvature(space: dict[str, Any]):
    loss = np.array(space["one_direction"])
    shares = space["shares"]
    assert (loss[(shares > 0) & (shares < 0.9)] < loss[0]).all()
    assert (loss[shares > 1.05] > loss[0]).all()
    assert space["along"] < space["sharpest"]
    gradient = np.array(space["whole_gradient"])
    assert gradient[shares == 1] < gradient[0]  # the quadratic model has them equal there


@pytest.mark.slow
def test_the_same_function_has_any_sharpness(space: dict[str, Any]):
    for losses, sharpness in zip(space["losses"], space["sharpness"], strict=True):
        np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
        assert max(sharpness) > 40 * min(sharpness)
        assert sharpness[-1] / sharpness[-2] == pytest.approx(16, rel=0.1)


@pytest.mark.slow
def test_newton_is_fast_where_it_is_convex_and_finds_the_saddle_where_it_is_not(space: dict[str, Any]):
    (newton, _), (descent, _) = space["convex"]["Newton"], space["convex"]["descent"]
    assert newton[5] - newton[-1] < 1e-8 < descent[-1] - newton[-1]
    (lost, point), (found, _) = space["saddle"]["Newton"], space["saddle"]["descent"]
    assert lost[-1] == pytest.approx(1)
    assert float(point[-1].norm()) < 1e-9
    assert found[-1] < 1e-9 < lost[0] < lost[-1]


def test_its_figures_are_there_and_it_is_in_the_navigation():
    for image in re.findall(r"\]\((images/[^)]+)\)", PAGE):
        assert (ROOT / "docs" / image).exists(), image
    assert "slides.md\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")

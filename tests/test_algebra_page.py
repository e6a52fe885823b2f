"""docs/algebra.md: its code runs from top to bottom, and gives what its words say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

PAGE = (Path(__file__).parent.parent / "docs" / "algebra.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    space: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        exec(compile(code, "docs/algebra.md", "exec"), space)
    return space


@pytest.fixture(scope="module")
def dense(names: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return names["H"].to_dense(), names["H_o"].to_dense()


def test_vectors_come_out_as_they_went_in(names, dense):
    truth = dense[0] @ names["v"]
    for found in (
        names["w"],
        torch.from_numpy(names["w_numpy"]),
        names["H"].space.from_dict(names["by_block"]),
        names["H"].space.gather(names["by_parameter"]),
        names["left"],
    ):
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-10)


def test_expressions(names, dense):
    D, H = names["D"].d, dense[0]
    top = torch.linalg.eigvalsh(D[:, None] * H * D / 2)[-1]
    assert names["top"][0] == pytest.approx(float(top), rel=1e-7)
    torch.testing.assert_close(names["corner"].to_dense(), H[:3, -3:], rtol=0, atol=1e-10)
    shift = names["regularized"].to_dense() - H
    assert sorted({round(float(x), 6) for x in shift.diagonal()}) == [0.001, 0.101]


def test_solutions(names, dense):
    n = names["n"]
    g = names["problem"].gradient("L0.*")
    truth = torch.linalg.solve(dense[1] + 1e-2 * torch.eye(n).double(), g)
    torch.testing.assert_close(names["newton"], truth, rtol=0, atol=1e-3 * float(truth.abs().max()))
    torch.testing.assert_close(names["scaled"] @ g, truth, rtol=0, atol=1e-5 * float(truth.abs().max()))


def test_estimates(names, dense):
    values = torch.linalg.eigvalsh(dense[1]).clamp_min(0)
    assert abs(names["total"] - float(values.sum())) < 4 * names["rest"].stderr
    logdet = float((values + 1e-2).log().sum())
    spread = 2 * (names["evidence"].high - names["evidence"].low)
    assert abs(names["evidence"].value - logdet) < spread
    effective = float((values / (values + 1e-2)).sum())
    assert (
        abs(names["effective"].value - effective)
        < 4 * names["effective"].stderr + names["effective"].last_steps
    )


def test_sharpness(names, dense):
    top = float(torch.linalg.eigvalsh(dense[0])[-1])
    assert names["found"].max_learning_rate == pytest.approx(3.8 / top, rel=1e-6)
    exact = np.linalg.eigvalsh(names["H"].block("L0.ln1.*").to_dense().numpy())
    for value, residual in zip(names["small"].values, names["small"].residuals, strict=True):
        assert np.abs(exact - value).min() <= residual + 1e-12


def test_it_is_in_the_navigation():
    root = Path(__file__).parent.parent
    assert "algebra.md\n" in (root / "mkdocs.yml").read_text(encoding="utf-8")

"""Steps within a ball, against the exact solution of the dense problem and Cauchy's point."""

from __future__ import annotations

import math

import pytest
import torch

import curvescope as cs
from curvescope.algorithms.systems.trust_region import to_boundary, trust_step
from curvescope.core.errors import ShapeError, UsageError

SOURCE = torch.Generator().manual_seed(0)
Q, _ = torch.linalg.qr(torch.randn(7, 7, generator=SOURCE, dtype=torch.float64))
G = torch.randn(7, generator=SOURCE, dtype=torch.float64)
BENT = torch.tensor([-1.0, 0.2, 0.5, 1.0, 2.0, 3.0, 6.0], dtype=torch.float64)


def matrix(values: torch.Tensor) -> torch.Tensor:
    return Q @ torch.diag(values) @ Q.T


def lowest(B: torch.Tensor, g: torch.Tensor, radius: float) -> float:
    """min q over the ball: d = −(B + λI)⁻¹g with ‖d‖ = radius, by bisection on λ (no hard case here)."""
    values, vectors = torch.linalg.eigh(B)
    c = vectors.T @ g

    def length(shift: float) -> float:
        return float((c / (values + shift)).norm())

    low, high = max(0.0, -float(values[0])) + 1e-12, 1e6
    if float(values[0]) > 0 and length(0.0) <= radius:
        low = high = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if length(middle) > radius else (low, middle)
    d = -vectors @ (c / (values + high))
    return float(g @ d + d @ B @ d / 2)


@pytest.mark.parametrize("radius", [0.05, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("bent", [BENT, BENT.abs()])
def test_a_step_lies_between_cauchy_and_the_lowest_point(bent, radius):
    B = matrix(bent)
    found = trust_step(cs.Matrix(B, symmetric=True), G, radius, tolerance=1e-12)
    q = float(G @ found.step + found.step @ B @ found.step / 2)
    assert found.change == pytest.approx(q)
    assert found.curvature == pytest.approx(float(found.step @ B @ found.step))
    assert float(found.step.norm()) <= radius * (1 + 1e-12)
    along = float(G @ B @ G)
    t = min(radius / float(G.norm()), float(G @ G) / along if along > 0 else math.inf)
    assert lowest(B, G, radius) - 1e-9 <= q <= -t * float(G @ G) + t * t * along / 2 + 1e-12


def test_inside_the_ball_it_is_the_solution():
    B = matrix(BENT.abs())
    found = trust_step(cs.Matrix(B, symmetric=True), G, math.inf, tolerance=1e-12)
    torch.testing.assert_close(found.step, torch.linalg.solve(B, -G))
    assert (found.end, found.num_products, found.at_boundary) == (
        "converged",
        6,
        False,
    )  # distinct eigenvalues


def test_few_products_end_at_the_limit_and_a_zero_gradient_at_once():
    B = cs.Matrix(matrix(BENT.abs()), symmetric=True)
    assert trust_step(B, G, math.inf, num_products=2, tolerance=1e-12).end == "limit"
    found = trust_step(B, torch.zeros_like(G), 1.0)
    assert (found.end, found.num_products, float(found.step.norm())) == ("converged", 0, 0.0)


@pytest.mark.parametrize("d", [[0.0, 0.0], [0.6, 0.0], [-0.6, 0.1], [1.0, 0.0]])
def test_the_way_to_the_boundary(d):
    d, p = torch.tensor(d, dtype=torch.float64), torch.tensor([0.3, 2.0], dtype=torch.float64)
    t = to_boundary(d, p, 1.0)
    assert t >= 0
    assert float((d + t * p).norm()) == pytest.approx(1.0)


def test_what_cannot_be_asked():
    with pytest.raises(UsageError, match="no minimum"):
        trust_step(cs.Matrix(matrix(-BENT.abs()), symmetric=True), G, math.inf)
    with pytest.raises(UsageError, match="radius above 0"):
        trust_step(cs.Matrix(matrix(BENT), symmetric=True), G, 0.0)
    with pytest.raises(ShapeError, match="7 entries"):
        trust_step(cs.Matrix(matrix(BENT), symmetric=True), G[:3], 1.0)

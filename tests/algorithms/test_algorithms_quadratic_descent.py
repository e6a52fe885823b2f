"""Gradient descent on quadratics: a Lanczos run against the steps themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import curvescope as cs
from curvescope.algorithms import quadratic_descent
from curvescope.core.errors import ShapeError, UsageError


def quadratic(eigenvalues, seed=0, dtype=torch.float64):
    source = torch.Generator().manual_seed(seed)
    n = len(eigenvalues)
    Q, _ = torch.linalg.qr(torch.randn(n, n, generator=source, dtype=torch.float64))
    H = Q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ Q.T
    return cs.Matrix(((H + H.T) / 2).to(dtype)), torch.randn(n, generator=source, dtype=torch.float64).to(
        dtype
    )


def walked(H, g, rate, num_steps):
    """q and ‖∇q‖ along the steps, taken one by one."""
    A, delta, rows = H.to_dense().double(), torch.zeros(len(g), dtype=torch.float64), []
    for _ in range(num_steps + 1):
        slope = g.double() + A @ delta
        rows.append((float(g.double() @ delta + delta @ A @ delta / 2), float(slope.norm())))
        delta = delta - rate * slope
    return np.array(rows).T


SPECTRA = {
    "definite": list(np.geomspace(1e-3, 5.0, 90)),
    "indefinite": list(np.linspace(-1.0, 4.0, 80)),
    "flat": [0.0] * 40 + [1.0, 2.0, 3.0],
    "repeated": [2.0] * 30,
    "one": [3.0],
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("share", [0.3, 0.95, 1.05])
def test_every_step_is_exact(name, share):
    H, g = quadratic(SPECTRA[name])
    rate = share * 2 / max(SPECTRA[name])
    found = quadratic_descent(H, g, [rate], 50)
    change, norms = walked(H, g, rate, 50)
    np.testing.assert_allclose(found.change[0], change, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(found.gradient_norm[0], norms, rtol=1e-8, atol=1e-9)
    assert found.num_products <= 51


def test_one_run_gives_all_learning_rates():
    H, g = quadratic(SPECTRA["definite"])
    rates = [0.1, 0.38, 0.42]
    found = quadratic_descent(H, g, rates, 20)
    for i, rate in enumerate(rates):
        np.testing.assert_allclose(found.change[i], walked(H, g, rate, 20)[0], rtol=1e-9)
    assert found.weights.sum() == pytest.approx(1.0)
    assert len(found.to_frame()) == 3 * 21


def test_fewer_steps_than_the_descent_would_not_do():
    H, g = quadratic(SPECTRA["definite"])
    rate = 1.05 * 2 / 5.0
    whole, cut = (quadratic_descent(H, g, [rate], n) for n in (50, 10))
    np.testing.assert_allclose(cut.change[0], whole.change[0, :11], rtol=1e-9)
    power = (1 - rate * cut.nodes) ** 100
    assert abs(power @ cut.weights / (whole.gradient_norm[0, -1] / whole.gradient_norm[0, 0]) ** 2 - 1) > 1e-3


def test_single_precision():
    H, g = quadratic(SPECTRA["definite"], dtype=torch.float32)
    found = quadratic_descent(H, g, [0.35], 50)
    np.testing.assert_allclose(found.change[0], walked(H, g, 0.35, 50)[0], rtol=1e-4, atol=1e-5)


def test_the_critical_learning_rate():
    H, g = quadratic(list(np.linspace(0.5, 5.0, 60)))
    below, above = quadratic_descent(H, g, [0.95 * 2 / 5.0, 1.05 * 2 / 5.0], 100).gradient_norm
    assert below[-1] < 1e-3 * below[0]
    assert above[-1] > 100 * above[0]


@pytest.mark.parametrize("rates", [[], [0.0], [-1.0], [float("nan")]])
def test_rates_are_checked(rates):
    H, g = quadratic([1.0, 2.0])
    with pytest.raises(UsageError, match="expected learning rates above 0"):
        quadratic_descent(H, g, rates, 3)


def test_the_gradient_is_checked():
    H, g = quadratic([1.0, 2.0])
    with pytest.raises(ShapeError, match="expected a gradient of 2 entries"):
        quadratic_descent(H, g[:1], [0.1], 3)
    with pytest.raises(ShapeError, match="not zero"):
        quadratic_descent(H, 0 * g, [0.1], 3)


def test_nearly_flat_directions_fall_as_they_should():
    H, g = cs.Matrix(torch.tensor([[5e-9]], dtype=torch.float64)), torch.ones(1, dtype=torch.float64)
    found = quadratic_descent(H, g, [1.0], 2000).change[0, -1]
    x, k = 5e-9, 2000
    assert found == pytest.approx(-k * (1 - (k - 0.5) * x), rel=1e-9)

"""Laws of the mean loss of a growing sample: against enumeration, and against quadrature that is exact."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, permutations, product

import numpy as np
import pytest

from curvescope.closed_form import landscape
from curvescope.core.errors import UsageError

EXACT = 1e-12


def gaussian_mean(f: Callable[[np.ndarray], float], dimension: int, sigma: float) -> float:
    """E f(z), z ~ N(0, σ² I), exact for polynomials of degree 9: Gauss and Hermite's nodes."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(5)
    weights = weights / weights.sum()
    total = 0.0
    for index in product(range(5), repeat=dimension):
        total += float(np.prod(weights[list(index)])) * f(sigma * nodes[list(index)])
    return total


def quadratics(source: np.random.Generator, S: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses, gradients and Hessians of S samples."""
    A = source.normal(size=(S, n, n))
    return source.normal(size=S), source.normal(size=(S, n)), A + A.transpose(0, 2, 1)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_law_is_exact_over_all_orders(k: int):
    values = np.array([0.3, 2.0, -1.1, 0.7, 5.0])
    found = [(np.mean(p[: k + 1]) - np.mean(p[:k])) ** 2 for p in permutations(values)]
    expected = landscape.mean_square_increment(values.var(ddof=1), k)
    assert np.mean(found) == pytest.approx(expected, rel=EXACT)


def test_the_law_is_exact_for_independent_draws():
    values, k = np.array([0.3, 2.0, -1.1]), 2
    found = [(np.mean(p) - np.mean(p[:k])) ** 2 for p in product(values, repeat=k + 1)]
    expected = landscape.mean_square_increment(values.var(), k)
    assert np.mean(found) == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize("s", [0.0, 0.1, 0.7])
def test_three_terms_are_the_mean_variance_around_a_point(s: float):
    a, g, H = quadratics(np.random.default_rng(0), 4, 2)
    t = np.trace(H, axis1=1, axis2=2)
    found = landscape.three_terms(
        s,
        loss_variance=a.var(ddof=1),
        loss_trace_covariance=float(np.cov(a, t)[0, 1]),
        trace_variance=t.var(ddof=1),
        gradient_covariance=g.var(0, ddof=1).sum(),
        fluctuation=H.var(0, ddof=1).sum(),
    )

    def variance(d: np.ndarray) -> float:
        return float((a + g @ d + 0.5 * np.einsum("i,sij,j->s", d, H, d)).var(ddof=1))

    assert found.total == pytest.approx(gaussian_mean(variance, 2, s), rel=EXACT)
    assert found.loss == pytest.approx((a + s**2 * t / 2).var(ddof=1), rel=EXACT)


def test_mean_square_gradient_of_subsets():
    g = np.random.default_rng(1).normal(size=(6, 3)) + 0.5
    mean, covariance = float((g.mean(0) ** 2).sum()), g.var(0).sum()
    for k in (1, 2, 4, 6):
        found = [(g[list(c)].mean(0) ** 2).sum() for c in combinations(range(6), k)]
        expected = landscape.gradient_mean_square(covariance, mean, k, 6)
        assert np.mean(found) == pytest.approx(expected, rel=EXACT)


def test_theorem_7_as_printed_fails_where_every_sample_is_stationary():
    """l_1 = 0, l_2 = w⁴: at w* = 0 both are stationary, L = 0 and M = 0; with M on the ball it is a bound."""
    w, k = 0.5, 1
    step = abs((0 + w**4) / 2 - 0)
    assert step > landscape.increment_bound(0.0, 0.0, w, k)
    assert step <= landscape.increment_bound(0.0, 12 * w**2, w, k)


def test_theorem_7_with_smoothness_on_the_ball_holds_without_stationary_samples():
    source = np.random.default_rng(2)
    for _ in range(300):
        a, b, k = source.normal(size=5) * 2, source.normal(size=5), 4
        w = source.normal() * source.choice([0.1, 1.0, 5.0])
        here, there = (np.logaddexp(0, a * x + b) for x in (0.0, w))  # ≥ 0 and a²/4-smooth everywhere
        step = abs(there.mean() - there[:k].mean())
        assert step <= landscape.increment_bound(here.max(), (a**2).max() / 4, abs(w), k)


def test_delta_2_is_exact_and_below_its_bound():
    source = np.random.default_rng(3)
    for sigma in (0.2, 1.5):
        losses, g, H = quadratics(source, 4, 2)
        k = 3
        a, c, B = ((x[k] - x[:k].mean(0)) / (k + 1) for x in (losses, g, H))

        def square(z: np.ndarray, a=a, c=c, B=B) -> float:
            return float(a + c @ z + 0.5 * z @ B @ z) ** 2

        found = landscape.quadratic_mean_square(a, c, B, sigma)
        assert found == pytest.approx(gaussian_mean(square, 2, sigma), rel=EXACT)
        top = 2 * np.linalg.norm(g, axis=1).max(), np.linalg.norm(H, 2, axis=(1, 2)).max()
        assert found <= landscape.quadratic_bound(np.abs(losses).max(), *top, sigma, 2, k)


@pytest.mark.parametrize(("variance", "tolerance"), [(1.0, 0.1), (2.0, 1.0), (6.0, 1.0), (0.01, 1.0)])
def test_samples_for_a_tolerance_is_the_least_number(variance: float, tolerance: float):
    k = landscape.samples_for(variance, tolerance)
    assert landscape.mean_square_increment(variance, k) <= tolerance**2 * (1 + EXACT)
    assert k == 1 or landscape.mean_square_increment(variance, k - 1) > tolerance**2


def test_a_tolerance_of_nothing_is_refused():
    with pytest.raises(UsageError, match="tolerance above 0"):
        landscape.samples_for(1.0, 0.0)

"""Exponents of the sweeps: claimed, published and measured, regime by regime, with a verdict.

A slope is that of ordinary least squares of log(mean over repeats) on log σ. Its interval is that of the
jackknife over repeats at 95 %, so it holds both the spread over weights and the noise of probes. A law that
was claimed holds if the measured slope is within the law's tolerance; where it is not, but is at the
exponent that theory gives for the regime, it holds with that exponent instead.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from curvescope.papers.ormaniec2025.growth.published import published_curves
from curvescope.papers.ormaniec2025.growth.settings import Experiment, Law, laws
from curvescope.runs.shown import FAILS, HOLDS

UNCLAIMED = "not claimed"


class Fit(NamedTuple):
    """A line through log value against log σ."""

    slope: float
    stderr: float
    num_points: int


class Slope(NamedTuple):
    """One line of the table of exponents."""

    block: str
    part: str
    layer: int
    regime: str
    sigma_lo: float
    sigma_hi: float
    num_points: int
    claimed: float  # NaN: nothing
    expected: float  # NaN: no law
    published: float
    published_stderr: float
    measured: float
    low: float
    high: float
    verdict: str


def fit(sigma: np.ndarray, values: np.ndarray) -> Fit:
    """Ordinary least squares of log values on log σ, over the values that are positive and finite."""
    good = np.isfinite(values) & (values > 0)
    x, y = np.log(sigma[good]), np.log(values[good])
    n = len(x)
    if n < 2:
        return Fit(math.nan, math.nan, n)
    x = x - x.mean()
    slope = float((x * y).sum() / (x * x).sum())
    left = y - y.mean() - slope * x
    stderr = math.sqrt((left * left).sum() / (n - 2) / (x * x).sum()) if n > 2 else math.nan
    return Fit(slope, stderr, n)


def interval(sigma: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Ends of the jackknife's interval at 95 % around the slope of the mean of values (repeats, scales)."""
    from scipy.stats import t

    n = len(values)
    if n < 2:
        return math.nan, math.nan
    total, center = values.sum(0), fit(sigma, values.mean(0)).slope
    without = np.array([fit(sigma, (total - row) / (n - 1)).slope for row in values])
    half = float(t.ppf(0.975, n - 1)) * math.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum())
    return center - half, center + half


def slopes(experiment: Experiment, sigma: np.ndarray, frobenius: np.ndarray, *, lenient: bool) -> list[Slope]:
    """The exponents of a sweep from its norms (repeats, scales, rows); `lenient` doubles the tolerances."""
    published = published_curves(experiment.name)
    found = []
    for k, (block, part, layer) in enumerate(experiment.rows):
        for law in laws(experiment, block, part, layer):
            inside = _inside(sigma, law)
            values = frobenius[:, inside, k]
            measured = fit(sigma[inside], values.mean(0))
            if measured.num_points < 2:
                continue
            curve = published.get((block, part, layer))
            grid = _inside(experiment.sigmas, law)
            then = fit(experiment.sigmas[grid], curve.mean[grid]) if curve else Fit(math.nan, math.nan, 0)
            found.append(
                Slope(
                    block, part, layer, law.regime, law.low, law.high, measured.num_points,
                    _number(law.claimed), _number(law.expected), then.slope, then.stderr, measured.slope,
                    *interval(sigma[inside], values), verdict(law, measured.slope, lenient=lenient),
                )
            )  # fmt: skip
    return found


def verdict(law: Law, measured: float, *, lenient: bool = False) -> str:
    """What the measured slope says about the law."""
    tolerance = law.tolerance * (2 if lenient else 1)
    right = law.expected is not None and abs(measured - law.expected) <= tolerance
    if law.claimed is None:
        return f"{UNCLAIMED}; σ^{law.expected:g}" if right else UNCLAIMED
    if abs(measured - law.claimed) <= tolerance:
        return HOLDS
    return f"{FAILS}; σ^{law.expected:g} {HOLDS}" if right else FAILS


def _inside(sigma: np.ndarray, law: Law) -> np.ndarray:
    return (sigma >= law.low * (1 - 1e-9)) & (sigma <= law.high * (1 + 1e-9))


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)

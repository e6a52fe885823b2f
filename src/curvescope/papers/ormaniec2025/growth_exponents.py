"""Exponents of the sweeps: claimed, published and measured in each regime, with a verdict.

A slope comes from ordinary least squares of log(mean over repeats) on log σ. Its 95 % interval comes from the
jackknife over repeats, so it contains both the variation over weights and the noise of probes. A claimed law
holds if the measured slope is within the law's tolerance. If it is not, but equals the theoretical exponent
of the regime, it holds with that exponent instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from curvescope.papers.common import published_table
from curvescope.papers.ormaniec2025.growth_sweeps import SweepExperiment
from curvescope.runs.study_result import FAILS, HOLDS

Curve = tuple[str, str, int]
"""Block, part and layer, counted from 0."""
UNCLAIMED = "not claimed"


@dataclass(frozen=True)
class GrowthLaw:
    """A range of scales in which a block is fitted by a power of σ, with claimed and expected power."""

    regime: str
    low: float
    high: float
    claimed: float | None  # exponent drawn or printed in the paper, if any
    expected: float | None  # theoretical exponent in this regime; None if there is none
    tolerance: float


def laws(experiment: SweepExperiment, block: str, part: str, layer: int) -> list[GrowthLaw]:
    """Return the fits of one curve; none if it is exactly zero."""
    if experiment.is_zero(block, part, layer):
        return []
    if experiment.family == "mlp":
        return [GrowthLaw("all σ", 0.01, 10, 2, 2, 0.01)]
    if experiment.family == "linear":
        return _linear_attention(experiment, part, layer)
    if experiment.norm == "pre":
        return _pre_norm(block, part)
    return _softmax(experiment, block, part)


def _softmax(experiment: SweepExperiment, block: str, part: str) -> list[GrowthLaw]:
    """Laws of small σ, where F' in W_Q is of order σ³ and in W_V of order σ, and F'' in W_Q of order σ⁵.

    They are limits for σ → 0. Their ranges come from the measured curves: one layer deviates near σ = 1,
    three layers near 0.1, five near 0.03. The longer ranges are fitted too, as claims without an expectation.
    Beyond σ = 1 attention and loss saturate. H_f of W_V in an inner layer comes from later scores, σ³; the
    paper claims nothing there.
    """
    expected = {("W_Q", "H_o"): 6, ("W_Q", "H_f"): 5, ("W_Q", "H"): 5, ("W_V", "H_f"): 3}.get(
        (block, part), 2
    )
    claimed = None if (block, part) == ("W_V", "H_f") else expected
    if experiment.grid == "linear":
        return [GrowthLaw("large σ", 1, 10, claimed, None, 0.05)]
    if experiment.grid == "linear_short":
        return [
            GrowthLaw("σ ≤ 1/2", 0.1, 0.5, claimed, None, 0.05),
            GrowthLaw("σ ≤ 1", 0.1, 1, claimed, None, 0.05),
        ]
    deep = experiment.depth > 3
    return [
        GrowthLaw("small σ", 0.01, 0.03 if deep else 0.1, claimed, expected, 0.05),
        *([GrowthLaw("σ ≤ 0.1", 0.01, 0.1, claimed, None, 0.05)] if deep else []),
        GrowthLaw("σ ≤ 1", 0.01, 1, claimed, expected if experiment.depth == 1 else None, 0.05),
        GrowthLaw("large σ", 1, 10, claimed, None, 0.05),
    ]


def _linear_attention(experiment: SweepExperiment, part: str, layer: int) -> list[GrowthLaw]:
    """The output is homogeneous of degree 3^D in the embeddings, so H_o ~ σ^(2·3^D).

    H_f is residual times second derivative: σ^(3^D) while the targets dominate the residual, twice this
    exponent if the output dominates. H follows H_f if H_f is larger.
    """
    degree = 3**experiment.depth
    tolerance = {1: 0.1, 2: 0.3, 3: 1.5}[experiment.depth]
    if part == "H_o" or layer == experiment.depth - 1:
        return [GrowthLaw("all σ", 0.1, 1, 2 * degree, 2 * degree, tolerance)]
    return [
        GrowthLaw("small σ", 0.1, 0.3, 2 * degree, degree, tolerance),
        GrowthLaw("large σ", 0.5, 1, 2 * degree, 2 * degree, tolerance),
    ]


def _pre_norm(block: str, part: str) -> list[GrowthLaw]:
    """Laws with pre-norm: no growth, until the residual stream outgrows attention's output.

    Attention reads normalized tokens. For large σ the later norms divide by σ, once per derivative of the
    stream. The claimed exponents are the published fits over the whole range. The end of the plateau comes
    from the measured curves.
    """
    printed = {
        ("W_V", "H_o"): -1.2, ("W_V", "H_f"): -1.3, ("W_V", "H"): -1.2,
        ("W_Q", "H_o"): -1.2, ("W_Q", "H_f"): -0.7, ("W_Q", "H"): -0.6,
    }[block, part]  # fmt: skip
    tail = -1 if block == "W_Q" and part != "H_o" else -2
    return [
        GrowthLaw("plateau", 0.01, 0.05, printed, 0, 0.15),
        GrowthLaw("all σ", 0.01, 10, printed, None, 0.1),
        GrowthLaw("large σ", 1, 10, printed, tail, 0.1),
    ]


@dataclass(frozen=True)
class PublishedCurve:
    """Published norm over the scales of the experiment's grid; 0 and inf mark the limits of float32."""

    mean: np.ndarray  # (20,)
    stderr: np.ndarray  # (20,) over repeats, including probe noise


def published_curves(experiment: str) -> dict[Curve, PublishedCurve]:
    """Read the published curves of a sweep, without those that are exactly zero; MLPs only have H."""
    return _all()[experiment]


@cache
def _all() -> dict[str, dict[Curve, PublishedCurve]]:
    curves: dict[str, dict[Curve, PublishedCurve]] = {}
    for row in published_table("ormaniec2025", "growth"):
        mean, stderr = (np.array([float(row[f"{name}{i}"]) for i in range(20)]) for name in ("mean", "sem"))
        curve = row["block"], row["part"], int(row["layer"])
        curves.setdefault(row["experiment"], {})[curve] = PublishedCurve(mean, stderr)
    return curves


class LineFit(NamedTuple):
    """Linear fit of log value on log σ."""

    slope: float
    stderr: float
    num_points: int


class Slope(NamedTuple):
    """One row of the table of exponents."""

    block: str
    part: str
    layer: int
    regime: str
    sigma_lo: float
    sigma_hi: float
    num_points: int
    claimed: float  # NaN: no claim
    expected: float  # NaN: no law
    published: float
    published_stderr: float
    measured: float
    low: float
    high: float
    verdict: str


def fit(sigma: np.ndarray, values: np.ndarray) -> LineFit:
    """Fit log values on log σ by ordinary least squares, over the positive and finite values."""
    good = np.isfinite(values) & (values > 0)
    x, y = np.log(sigma[good]), np.log(values[good])
    n = len(x)
    if n < 2:
        return LineFit(math.nan, math.nan, n)
    x = x - x.mean()
    slope = float((x * y).sum() / (x * x).sum())
    left = y - y.mean() - slope * x
    stderr = math.sqrt((left * left).sum() / (n - 2) / (x * x).sum()) if n > 2 else math.nan
    return LineFit(slope, stderr, n)


def interval(sigma: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Ends of the 95 % jackknife interval around the slope of the mean of values (repeats, scales)."""
    from scipy.stats import t

    n = len(values)
    if n < 2:
        return math.nan, math.nan
    total, center = values.sum(0), fit(sigma, values.mean(0)).slope
    without = np.array([fit(sigma, (total - row) / (n - 1)).slope for row in values])
    half = float(t.ppf(0.975, n - 1)) * math.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum())
    return center - half, center + half


def slopes(
    experiment: SweepExperiment, sigma: np.ndarray, frobenius: np.ndarray, *, lenient: bool
) -> list[Slope]:
    """Exponents of a sweep from its norms (repeats, scales, rows); `lenient` doubles the tolerances."""
    published = published_curves(experiment.name)
    rows = []
    for k, (block, part, layer) in enumerate(experiment.rows):
        for law in laws(experiment, block, part, layer):
            inside = _inside(sigma, law)
            values = frobenius[:, inside, k]
            measured = fit(sigma[inside], values.mean(0))
            if measured.num_points < 2:
                continue
            curve = published.get((block, part, layer))
            grid = _inside(experiment.sigmas, law)
            then = fit(experiment.sigmas[grid], curve.mean[grid]) if curve else LineFit(math.nan, math.nan, 0)
            rows.append(
                Slope(
                    block, part, layer, law.regime, law.low, law.high, measured.num_points,
                    _number(law.claimed), _number(law.expected), then.slope, then.stderr, measured.slope,
                    *interval(sigma[inside], values), verdict(law, measured.slope, lenient=lenient),
                )
            )  # fmt: skip
    return rows


def verdict(law: GrowthLaw, measured: float, *, lenient: bool = False) -> str:
    """Verdict on a law from the measured slope."""
    tolerance = law.tolerance * (2 if lenient else 1)
    right = law.expected is not None and abs(measured - law.expected) <= tolerance
    if law.claimed is None:
        return f"{UNCLAIMED}; σ^{law.expected:g}" if right else UNCLAIMED
    if abs(measured - law.claimed) <= tolerance:
        return HOLDS
    return f"{FAILS}; σ^{law.expected:g} {HOLDS}" if right else FAILS


def _inside(sigma: np.ndarray, law: GrowthLaw) -> np.ndarray:
    return (sigma >= law.low * (1 - 1e-9)) & (sigma <= law.high * (1 + 1e-9))


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)

"""What is published with these curves, next to what was measured; verdicts follow from the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.algorithms.estimates.intervals import student
from curvescope.papers.common import decided
from curvescope.runs.shown import FAILS, HOLDS, Claim, Origin
from curvescope.studies.landscape.claims import TAUTOLOGY, interval, overlap

if TYPE_CHECKING:
    from curvescope.papers.petrov2025.convergence.study import Convergence, Curve

OTHERS = "not comparable: other network and pictures"
E4: Origin = ("petrov2025, figure", "paper")
E7: Origin = ("authors' code", "paper")
E8: Origin = ("arXiv 2409.11995, figure", "paper")
READING: Origin = ("ours, from the precursor's lemma ‖H‖ ∝ L(hM)^{2L}", "ours")
OURS: Origin = ("ours", "ours")
RESAMPLES, ENDS = 1000, (2.5, 97.5)
NEAR = 3.0  # a factor that a number which is read off a figure may be off
HEIGHTS = {"E7.rank8": (3333, 1e-5, E7), "E7.rank16": (3333, 4e-6, E7)}
"""k, and the published mean |L_{k+1} − L_k| there."""


def of(found: Convergence) -> list[Claim]:
    """All claims."""
    first = found.curves["E4"]
    return [
        _slope(first),
        _plateau(first),
        *(_height(found.curves[name], *published) for name, published in HEIGHTS.items()),
        _rank(found),
        _grows(found, "width", "h"),
        _grows(found, "hidden", "L"),
        _law(found),
        _like_controls(found),
    ]


def _slope(curve: Curve) -> Claim:
    g = curve.growth
    near = abs(g.model.slope[0] - g.law_slope) < 0.1
    verdict = (TAUTOLOGY if overlap(g.model.slope, g.control.slope) else HOLDS) if near else FAILS
    shown = f"model {interval(g.model.slope)}, {g.control_name} numbers {interval(g.control.slope)}"
    return Claim("E4: |L_{k+1} − L_k| of a ViT falls as 1/k", "slope −1", shown, verdict, *E4)


def _plateau(curve: Curve) -> Claim:
    g = curve.growth
    flat = g.model.early[0] > g.model.slope[0] / 2
    verdict = (TAUTOLOGY if overlap(g.model.early, g.control.early) else HOLDS) if flat else FAILS
    shown = f"smoothed slope at first: model {interval(g.model.early)}, control {interval(g.control.early)}"
    return Claim("E4: it is flat at first, then steep", "flat below k ≈ 5,000", shown, verdict, *E4)


def _height(curve: Curve, k: int, published: float, origin: Origin) -> Claim:
    """Mean |L_{k+1} − L_k| at k, by its limit deviation/k."""
    value = curve.deviation / k
    same = curve.pictures == "mnist" and not curve.note
    near = 1 / NEAR < value / published < NEAR
    verdict = (HOLDS if near else FAILS) if same else OTHERS
    shown = f"{value:.2g} (deviation {curve.deviation:.3g}/k) with {curve.network} on {curve.pictures}"
    words = f"{curve.family}: mean |L_{{k+1}} − L_k| at k = {k:,}, {curve.network.rpartition(' with ')[2]}"
    return Claim(words, f"{published:g}", shown, verdict, *origin)


def _rank(found: Convergence) -> Claim:
    """Deviations on the same pictures, with an interval by resampling these."""
    low_rank, high_rank = (found.curves[name].losses for name in HEIGHTS)
    source, n = np.random.default_rng(0), len(low_rank)
    rows = [np.arange(n), *(source.integers(0, n, n) for _ in range(RESAMPLES))]
    ratios = [_deviation(high_rank[row]) / _deviation(low_rank[row]) for row in rows]
    low, high = np.percentile(ratios[1:], ENDS)
    verdict = decided(right=high < 1, wrong=low > 1)
    shown = f"rank 16 over rank 8: {ratios[0]:.2f} [{low:.2f}, {high:.2f}]"
    return Claim("E7: the curve of rank 16 ends below that of rank 8", "4e-06 and 1e-05", shown, verdict, *E7)


def _deviation(losses: np.ndarray) -> float:
    return float(np.abs(losses - losses.mean()).mean())


def _grows(found: Convergence, name: str, symbol: str) -> Claim:
    """The exponent of the deviation in width or depth, the other as a factor, over all networks."""
    curves = list(found.of("E8").values())
    extra = {"width": 0, "hidden": 2}
    x = np.log([getattr(c, name) + extra[name] for c in curves])
    others = [getattr(c, "hidden" if name == "width" else "width") for c in curves]
    columns = [x, *(np.array(others) == value for value in sorted(set(others)))]
    exponent, half = _least_squares(np.array(columns, dtype=float).T, np.log([c.deviation for c in curves]))
    verdict = decided(right=exponent - half > 0, wrong=exponent + half < 0)
    what = "width h" if name == "width" else "depth L"
    shown = f"k|L_{{k+1}} − L_k| ∝ {symbol}^{exponent:.2f} [{exponent - half:.2f}, {exponent + half:.2f}]"
    return Claim(f"E8: it grows with the {what}, as the bound does", "grows", shown, verdict, *READING)


def _least_squares(X: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """The first coefficient and half its 95 % interval, unknown without more rows than columns."""
    coefficients, *_ = np.linalg.lstsq(X, y, rcond=None)
    free = len(y) - X.shape[1]
    if free < 1:
        return float(coefficients[0]), float("nan")
    variance = float(((y - X @ coefficients) ** 2).sum()) / free * np.linalg.inv(X.T @ X)[0, 0]
    return float(coefficients[0]), student(free) * float(np.sqrt(variance))


def _law(found: Convergence) -> Claim:
    """k(k+1) E(L_{k+1} − L_k)² over the variance, in four standard errors of every curve."""
    ratios = np.array([c.growth.model.ratio for c in found.curves.values()])
    so = np.abs(ratios[:, 0] - 1) <= 4 / 1.96 * (ratios[:, 2] - ratios[:, 1]) / 2
    shown = f"ratio {ratios[:, 0].min():.3f} to {ratios[:, 0].max():.3f}; {so.sum()} of {len(so)} networks"
    claim = "E(L_{k+1} − L_k)² = Var/(k(k+1)) for all these networks"
    return Claim(claim, "ratio 1", shown, HOLDS if so.all() else FAILS, *OURS)


def _like_controls(found: Convergence) -> Claim:
    pairs = [(c.growth.model.slope, c.growth.control.slope) for c in found.curves.values()]
    so = [overlap(model, control) for model, control in pairs]
    models = [model[0] for model, _ in pairs]
    shown = f"{sum(so)} of {len(so)} networks; slopes {min(models):.3f} to {max(models):.3f}"
    verdict = HOLDS if all(so) else FAILS if not any(so) else "in part of the networks"
    return Claim("slopes are those of independent numbers", "intervals overlap", shown, verdict, *OURS)

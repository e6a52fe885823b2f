"""|L_{k+1} − L_k| as the sample grows, for the losses of a model and for numbers that know of no model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from curvescope.closed_form.landscape import mean_square_increment
from curvescope.core.result import Result

EMA = 0.99  # the published smoothing
FIRST = 10  # samples before a slope is fitted
POINTS = 40  # of a fit, evenly spread in log k
RESAMPLES = 400
ENDS = (2.5, 97.5)


@dataclass(frozen=True)
class Curve(Result):
    """Increments of one kind of numbers, over random orders."""

    mean: np.ndarray  # (N − 1,) mean |L_{k+1} − L_k|
    mean_stderr: np.ndarray
    rms: np.ndarray  # (N − 1,) root mean square
    rms_stderr: np.ndarray
    smoothed: np.ndarray  # (N − 1,) exponential moving average of `mean`
    slope: np.ndarray  # d log mean / d log k from FIRST on, and its interval
    early: np.ndarray  # of `smoothed` below FIRST · 10, and its interval
    late: np.ndarray  # of `smoothed` in the last half of the range, and its interval
    ratio: np.ndarray  # mean of k(k + 1)(L_{k+1} − L_k)² over Var for k ≤ N/2, and its interval


@dataclass(frozen=True)
class Growth(Result):
    """Model, control and law, for k = 1, …, N − 1."""

    k: np.ndarray
    model: Curve
    control: Curve
    law: np.ndarray  # √(Var/(k(k + 1)))
    law_slope: float
    control_name: str
    variance: float  # of the losses, divisor N − 1
    deviation: float  # mean |l − mean|: the limit of k |L_{k+1} − L_k|
    num_orders: int
    seed: int


def growth(losses: np.ndarray, *, num_orders: int, seed: int) -> Growth:
    """Random orders of the losses, and as many draws of control numbers with their mean and variance."""
    N, source = len(losses), np.random.default_rng(seed)
    variance, k = float(losses.var(ddof=1)), np.arange(1, N)
    orders = np.stack([source.permutation(losses) for _ in range(num_orders)])
    drawn, name = _control(losses, (num_orders, N), source)
    law = np.sqrt(mean_square_increment(variance, k.astype(float)))
    return Growth(
        k=k,
        model=curve(orders, variance, source),
        control=curve(drawn, variance, source),
        law=law,
        law_slope=slope(k, law[None], FIRST, N)[0],
        control_name=name,
        variance=variance,
        deviation=float(np.abs(losses - losses.mean()).mean()),
        num_orders=num_orders,
        seed=seed,
    )


def increments(values: np.ndarray) -> np.ndarray:
    """L_{k+1} − L_k for k = 1, …, N − 1 along the last axis: (…, N) to (…, N − 1)."""
    means = np.cumsum(values, axis=-1) / np.arange(1, values.shape[-1] + 1)
    return np.diff(means, axis=-1)


def curve(values: np.ndarray, variance: float, source: np.random.Generator) -> Curve:
    """Means over the rows of `values`, each one order of N numbers; intervals by resampling the rows."""
    steps = np.abs(increments(values))
    R, last = steps.shape
    k = np.arange(1, last + 1)
    squares = steps**2
    rms = np.sqrt(squares.mean(0))
    again = np.stack([steps[source.integers(0, R, R)].mean(0) for _ in range(RESAMPLES)])
    mean = np.concatenate([steps.mean(0)[None], again])  # the first row is the estimate
    smoothed = smooth(mean)
    scaled = scaled_squares(steps) / variance
    half = 1.96 * scaled.std(ddof=1) / np.sqrt(R)
    return Curve(
        mean=mean[0],
        mean_stderr=steps.std(0, ddof=1) / np.sqrt(R),
        rms=rms,
        rms_stderr=squares.std(0, ddof=1) / np.sqrt(R) / (2 * rms + 1e-300),
        smoothed=smoothed[0],
        slope=_interval(slope(k, mean, FIRST, last)),
        early=_interval(slope(k, smoothed, 1, min(10 * FIRST, last))),
        late=_interval(slope(k, smoothed, last // 2, last)),
        ratio=np.array([scaled.mean(), scaled.mean() - half, scaled.mean() + half]),
    )


def scaled_squares(steps: np.ndarray) -> np.ndarray:
    """The mean of k(k + 1)(L_{k+1} − L_k)² over k ≤ N/2, one number per row of increments (…, N − 1).

    Its expectation is the variance. Over all k it is the variance itself, in any order, and would check
    nothing: Σ_i (l_i − L_N)² = Σ_k (k/(k + 1)) (l_{k+1} − L_k)².
    """
    half = max(1, (steps.shape[-1] + 1) // 2)
    k = np.arange(1, half + 1)
    return (steps[..., :half] ** 2 * k * (k + 1)).mean(-1)


def smooth(curves: np.ndarray, keep: float = EMA) -> np.ndarray:
    """e_1 = x_1, e_k = keep e_{k−1} + (1 − keep) x_k along the last axis."""
    found = np.empty_like(curves)
    found[..., 0] = curves[..., 0]
    for k in range(1, curves.shape[-1]):
        found[..., k] = keep * found[..., k - 1] + (1 - keep) * curves[..., k]
    return found


def slope(k: np.ndarray, curves: np.ndarray, low: int, high: int) -> np.ndarray:
    """Least-squares slope of log curve against log k, over points evenly spread in log k: (rows,)."""
    spread = np.geomspace(max(low, 1), max(min(high, k[-1]), low + 1), POINTS)
    chosen = np.unique(np.clip(np.round(spread).astype(int), k[0], k[-1])) - 1
    x, y = np.log(k[chosen]), np.log(np.maximum(curves[:, chosen], 1e-300))
    x = x - x.mean()
    return y @ x / max(float(x @ x), 1e-300)


def _interval(found: np.ndarray) -> np.ndarray:
    """Estimate and ends of the resamples' middle 95 %."""
    return np.array([found[0], *np.percentile(found[1:], ENDS)])


def _control(
    losses: np.ndarray, shape: tuple[int, int], source: np.random.Generator
) -> tuple[np.ndarray, str]:
    """Independent numbers with the losses' mean and variance: lognormal, or normal if some are negative."""
    mean, variance = float(losses.mean()), float(losses.var(ddof=1))
    if losses.min() <= 0:
        return source.normal(mean, np.sqrt(variance), shape), "normal"
    spread = np.log1p(variance / mean**2)
    return source.lognormal(np.log(mean) - spread / 2, np.sqrt(spread), shape), "lognormal"

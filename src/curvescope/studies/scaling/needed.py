"""How many samples a tolerance needs, by the law that is exact: no Hessian, no exponent, one variance.

With L_k the mean loss of k independent samples at fixed weights, L_{k+1} − L_k = (ℓ_{k+1} − L_k)/(k + 1), so

    E (L_{k+1} − L_k)² = Var ℓ / (k (k + 1)),

for every model and every k. The least k that keeps its root within τ is about √Var / τ. Here the variance is
taken from held-out samples, and k is checked on fresh ones: differences of their own, none used twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from curvescope.algorithms.estimates.intervals import positive_interval, student
from curvescope.closed_form.landscape import samples_for
from curvescope.core.result import Result

FEWEST_ROUNDS = 8  # differences that a check needs


@dataclass(frozen=True)
class Needed(Result):
    """The number of samples for a tolerance, with the interval that the variance leaves, and its check."""

    tolerance: float
    variance: float  # of the loss of one sample
    variance_low: float
    variance_high: float
    k: int
    k_low: int
    k_high: int
    rounds: int  # differences on fresh samples; 0: too few samples for a check
    rms: float  # of L_{k+1} − L_k over them
    rms_low: float
    rms_high: float

    @property
    def right(self) -> bool | None:
        """Whether fresh samples speak for the tolerance, not above it beyond doubt; None: not checked."""
        return None if self.rounds == 0 else self.rms_low <= self.tolerance


def variance_interval(losses: np.ndarray) -> tuple[float, float, float]:
    """The variance of samples (n,) and a 95 % interval, from their fourth moment, on a logarithmic scale."""
    n = len(losses)
    away = losses - losses.mean()
    variance = float((away**2).sum() / (n - 1))
    if variance == 0:
        return 0.0, 0.0, 0.0
    fourth = float((away**4).mean())
    stderr = math.sqrt(max(fourth - variance**2 * (n - 3) / (n - 1), 0.0) / n)
    step = math.exp(student(n - 1) * stderr / variance)
    return variance, variance / step, variance * step


def differences(fresh: np.ndarray, k: int) -> np.ndarray:
    """L_{k+1} − L_k of as many groups of k + 1 samples as there are in `fresh` (n,)."""
    rounds = len(fresh) // (k + 1)
    groups = fresh[: rounds * (k + 1)].reshape(rounds, k + 1)
    return groups.mean(axis=1) - groups[:, :k].mean(axis=1)


def plan_data(held_out: np.ndarray, fresh: np.ndarray, *, tolerance: float) -> Needed:
    """k from the losses of held-out samples (n,), checked on those of fresh samples (m,)."""
    variance, low, high = variance_interval(held_out)
    k = samples_for(variance, tolerance)
    ends = {"k_low": samples_for(low, tolerance), "k_high": samples_for(high, tolerance)}
    rounds = len(fresh) // (k + 1)
    rounds = rounds if rounds >= FEWEST_ROUNDS else 0
    rms, bottom, top = _root_mean_square(differences(fresh, k)) if rounds else 3 * (math.nan,)
    return Needed(
        tolerance=tolerance,
        variance=variance,
        variance_low=low,
        variance_high=high,
        k=k,
        rounds=rounds,
        rms=rms,
        rms_low=bottom,
        rms_high=top,
        **ends,
    )


def _root_mean_square(found: np.ndarray) -> tuple[float, float, float]:
    squares = found**2
    mean, stderr = squares.mean(), squares.std(ddof=1) / math.sqrt(len(squares))
    low, high = positive_interval(np.asarray(mean), np.asarray(stderr), len(squares) - 1)
    return math.sqrt(mean), math.sqrt(low), math.sqrt(high)

"""What nodes and weights say of a distribution of eigenvalues without broadening: bounds, shares, outliers.

One probe gives the Gauss quadrature Σ wᵢ δ(λ − θᵢ) of its measure F. By the theorem of Chebyshev, Markov
and Stieltjes F equals W_i = w₁ + … + w_i somewhere between θ_i and θ_{i+1}, hence

    W_{i−1} ≤ F(x) ≤ W_{i+1}   for θ_i < x < θ_{i+1},   W_{i−1} ≤ F(θ_i) ≤ W_i just before and after θ_i.

These bounds are certain (up to rounding) for the measures of the probes. Their mean differs from the
distribution of the eigenvalues by the choice of the probes alone, which a standard error describes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from curvescope.algorithms.columns import mean_and_stderr
from curvescope.core.result import Result

ISOLATED = 0.1  # spread of an outlier over probes, relative to its distance from the next node
MEMBERS = 4  # most eigenvalues that are taken for one outlier


@dataclass(frozen=True)
class Cumulative(Result):
    """Share of the eigenvalues up to x, with its bounds; a figure draws a step between low and high."""

    x: np.ndarray  # (G,) ascending
    share: np.ndarray  # (G,) mean over probes
    low: np.ndarray  # (G,) certain bounds of the probes' mean
    high: np.ndarray  # (G,)
    stderr: np.ndarray  # (G,) of the mean over probes; nan for one, zero when exact


@dataclass(frozen=True)
class Share(Result):
    """Share of the eigenvalues in an interval."""

    value: float
    low: float  # certain bounds of the probes' mean
    high: float
    stderr: float  # of the mean over probes; nan for one, zero when exact


@dataclass(frozen=True)
class Outliers(Result):
    """Eigenvalues, or small groups of them, that stand apart from the rest at either end."""

    values: np.ndarray  # (M,) ascending
    spread: np.ndarray  # (M,) largest difference between probes, or within the group
    count: np.ndarray  # (M,) number of eigenvalues there: n times the weight
    count_stderr: np.ndarray  # (M,)


def cumulative(
    nodes: np.ndarray, weights: np.ndarray, x: np.ndarray, *, exact: bool, psd: bool = False
) -> Cumulative:
    """Shares at the points x (G,), right-continuous, from nodes and weights (P, S)."""
    x = np.sort(np.asarray(x, dtype=float).ravel())
    rows = [_one_probe(t[w > 0], w[w > 0], x, exact) for t, w in zip(nodes, weights, strict=True)]
    shares, lows, highs = (np.stack(columns) for columns in zip(*rows, strict=True))
    if psd:  # rounding may put a node below zero; no eigenvalue is there
        shares, lows, highs = (np.where(x < 0, 0.0, part) for part in (shares, lows, highs))
    share, stderr = mean_and_stderr(shares)
    return Cumulative(x, share, lows.mean(axis=0), highs.mean(axis=0), 0 * share if exact else stderr)


def _one_probe(
    nodes: np.ndarray, weights: np.ndarray, x: np.ndarray, exact: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Share, lower and upper bound at each x for ascending nodes (S,)."""
    W = np.concatenate([[0.0, 0.0], np.cumsum(weights), [1.0]])  # W[i + 1] is the sum of the first i
    W = np.minimum(W, 1.0)
    upto = np.searchsorted(nodes, x, side="right")
    before = np.searchsorted(nodes, x, side="left")
    share = W[upto + 1]
    if exact:
        return share, share, share
    # at a node the upper bound is W_i, between nodes W_{i+1}
    return share, W[upto], W[np.where(before < upto, upto + 1, upto + 2)]


def share_within(nodes: np.ndarray, weights: np.ndarray, limit: float, *, exact: bool, psd: bool) -> Share:
    """Share of the eigenvalues with |λ| < limit."""
    inside = np.where(np.abs(nodes) < limit, weights, 0.0).sum(axis=1)
    value, stderr = (float(part) for part in mean_and_stderr(inside))
    if exact:
        return Share(value, value, value, 0.0)
    ends = cumulative(nodes, weights, np.array([-limit, limit]), exact=exact, psd=psd)
    low, high = max(0.0, ends.low[1] - ends.high[0]), min(1.0, ends.high[1] - ends.low[0])
    return Share(value, float(low), float(high), stderr)


def outliers(nodes: np.ndarray, weights: np.ndarray, size: int, *, width: float) -> Outliers:
    """Nodes at either end that all probes agree on, in groups of at most four, from outside inwards.

    A group has the same number of nodes from each probe, and the differences within it are at most a tenth
    of the distance to the next node; that distance must exceed `width` for a single probe.
    """
    probe = np.repeat(np.arange(len(nodes)), nodes.shape[1])
    alive = weights.ravel() > 0
    order = np.argsort(nodes.ravel()[alive], kind="stable")
    theta, w, probe = (part[alive][order] for part in (nodes.ravel(), weights.ravel(), probe))
    upper = _from_the_top(theta[::-1], w[::-1], probe[::-1], len(nodes), size, width)
    rest = len(theta) - sum(len(group[0]) for group in upper)
    lower = _from_the_top(-theta[:rest], w[:rest], probe[:rest], len(nodes), size, width)
    groups = [(-t, *others) for t, *others in lower] + upper[::-1]
    values = np.array([t.mean() for t, _ in groups])
    counts = [mean_and_stderr(count) for _, count in groups]
    return Outliers(
        values=values,
        spread=np.array([np.ptp(t) for t, _ in groups]),
        count=np.array([float(mean) for mean, _ in counts]),
        count_stderr=np.array([float(error) for _, error in counts]),
    )


def _from_the_top(
    theta: np.ndarray, w: np.ndarray, probe: np.ndarray, num_probes: int, size: int, width: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Groups of descending nodes that stand apart: their nodes, and n times their weight in each probe."""
    groups, start = [], 0
    least = width if num_probes == 1 else 0.0
    for stop in range(num_probes, len(theta), 1):
        members = np.bincount(probe[start:stop], minlength=num_probes)
        gap, extent = theta[stop - 1] - theta[stop], theta[start] - theta[stop - 1]
        if members.min() == members.max() and extent <= ISOLATED * gap and gap > least:
            weight = np.bincount(probe[start:stop], weights=w[start:stop], minlength=num_probes)
            groups.append((theta[start:stop], size * weight))
            start = stop
        elif members.max() > MEMBERS:
            break
    return groups

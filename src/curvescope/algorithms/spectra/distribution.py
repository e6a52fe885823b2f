"""Bounds, shares and outliers of a distribution of eigenvalues from nodes and weights, without broadening.

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

ISOLATED = 0.1  # largest spread and residual of an outlier, relative to its distance from the next node
MAX_MEMBERS = 4  # most nodes of one probe that form one outlier
MAX_EIGENVALUES = 10  # most eigenvalues of an outlier; a larger group belongs to the bulk
RESOLVED = 2.0  # widths: two Gaussians that are farther apart have a minimum between them
MIN_GAP = 5.0  # mean distances of the remaining eigenvalues: gaps up to here occur inside a bulk
NEAR_WIDTHS = 2.0  # widths of a kernel that count as near
SAME_NODE = 1e-6  # share of the range: closer nodes of one probe count as one


@dataclass(frozen=True)
class Cumulative(Result):
    """Share of the eigenvalues up to x, with its bounds; a figure draws a step between low and high."""

    x: np.ndarray  # (G,) ascending
    share: np.ndarray  # (G,) mean over probes
    low: np.ndarray  # (G,) certain bounds of the probes' mean
    high: np.ndarray  # (G,)
    stderr: np.ndarray  # (G,) of the mean over probes; nan for one, zero when exact


@dataclass(frozen=True)
class SpectrumShare(Result):
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
    count_stderr: np.ndarray  # (M,) zero if exact; else √(2k / probes) for k eigenvalues, k at least 1


def cumulative(
    nodes: np.ndarray, weights: np.ndarray, x: np.ndarray, *, exact: bool, psd: bool = False
) -> Cumulative:
    """Shares at the points x (G,), right-continuous, from nodes and weights (P, S)."""
    x = np.sort(np.asarray(x, dtype=float).ravel())
    # A probe with fewer nodes than steps lies in an invariant subspace, and its measure is exact.
    rows = [
        _one_probe(t[w > 0], w[w > 0], x, exact or not (w > 0).all())
        for t, w in zip(nodes, weights, strict=True)
    ]
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


def share_within(
    nodes: np.ndarray, weights: np.ndarray, limit: float, *, exact: bool, psd: bool
) -> SpectrumShare:
    """Share of the eigenvalues with |λ| < limit."""
    inside = np.where(np.abs(nodes) < limit, weights, 0.0).sum(axis=1)
    value, stderr = (float(part) for part in mean_and_stderr(inside))
    if exact:
        return SpectrumShare(value, value, value, 0.0)
    ends = cumulative(nodes, weights, np.array([-limit, limit]), exact=exact, psd=psd)
    low, high = max(0.0, ends.low[1] - ends.high[0]), min(1.0, ends.high[1] - ends.low[0])
    return SpectrumShare(value, float(low), float(high), stderr)


def resolved(nodes: np.ndarray, weights: np.ndarray, width: float) -> np.ndarray:
    """Return a mask like nodes (P, S): True if the density at a node shows the data, not the kernel.

    The weight of a node certainly lies between its two neighbors, so these must be at most two widths apart.
    Also, the weight near a node (within NEAR_WIDTHS widths) must be spread over half a width or more: a
    narrower peak shows the kernel.
    """
    is_resolved = np.zeros(nodes.shape, dtype=bool)
    for row, (theta, w) in enumerate(zip(nodes, weights, strict=True)):
        order = np.argsort(theta, kind="stable")
        alive = order[w[order] > 0]
        t, v = theta[alive], w[alive]
        ends = np.concatenate([[-np.inf], t, [np.inf]])
        near = np.where(np.abs(t[:, None] - t) <= NEAR_WIDTHS * width, v, 0.0)
        near /= near.sum(axis=1, keepdims=True)
        spread = np.sqrt(np.maximum(near @ t**2 - (near @ t) ** 2, 0.0))
        is_resolved[row, alive] = (ends[2:] - ends[:-2] <= 2 * width) & (spread >= width / 2)
    return is_resolved


def outliers(nodes: np.ndarray, weights: np.ndarray, size: int, *, width: float, exact: bool) -> Outliers:
    """Nodes at either end that stand apart and that all probes agree on, from outside inwards.

    A group has the same number of nodes, at most four, from each probe, and holds at most ten eigenvalues.
    All outliers together hold less than half of the eigenvalues. Let gap be the distance to the next node
    inwards. It must exceed two widths of the density, and five mean distances of the eigenvalues farther
    inwards. The differences within the group and the residuals of its Ritz values must be at most a tenth
    of it. An average over a bulk, which probes agree on as well, has a large residual.
    """
    ends = [_alive_nodes(*row) for row in zip(nodes, weights, strict=True)]
    theta, w = (np.concatenate([row[i] for row in ends]) for i in (0, 1))
    low, high = float(theta.min()), float(theta.max())
    # A probe with far fewer distinct nodes than steps lies in an invariant subspace: no residual is left.
    residuals = [
        np.zeros_like(t)
        if exact or 2 * len(t) <= nodes.shape[1]
        else (high - low) / 2 * _last_components(t, v)
        for t, v in ends
    ]
    probe = np.repeat(np.arange(len(ends)), [len(t) for t, _ in ends])
    order = np.argsort(theta, kind="stable")
    columns = np.stack([theta, w * size, np.concatenate(residuals)])[:, order]
    probe, num_probes = probe[order], len(ends)
    upper = _from_the_top(columns[:, ::-1], probe[::-1], num_probes, size, width)
    rest = len(theta) - sum(len(group[0]) for group in upper)
    size_left = size - sum(group[1].mean() for group in upper)
    mirrored = columns[:, :rest] * np.array([[-1.0], [1.0], [1.0]])
    lower = _from_the_top(mirrored, probe[:rest], num_probes, size_left, width)
    if sum(group[1].mean() for group in [*upper, *lower]) >= size / 2:
        upper, lower = [], []
    groups = [(-t, count) for t, count in lower] + upper[::-1]
    count = np.array([float(count.mean()) for _, count in groups])
    return Outliers(
        values=np.array([t.mean() for t, _ in groups]),
        spread=np.array([np.ptp(t) for t, _ in groups]),
        count=count,
        count_stderr=0 * count if exact else np.sqrt(2 * np.maximum(count, 1) / num_probes),
    )


def _alive_nodes(nodes: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nodes of one probe, ascending, and their weights; nodes closer than SAME_NODE become one."""
    order = np.argsort(nodes[weights > 0], kind="stable")
    theta, w = nodes[weights > 0][order], weights[weights > 0][order]
    starts = np.flatnonzero(np.diff(theta, prepend=-np.inf) > SAME_NODE * np.ptp(theta))
    return theta[starts], np.add.reduceat(w, starts)


def _last_components(theta: np.ndarray, w: np.ndarray) -> np.ndarray:
    """|last entries| of the unit eigenvectors of the Jacobi matrix with these nodes and weights.

    Times the next off-diagonal entry of Lanczos, at most half of the range, they are the residuals of the
    Ritz values. First times last entry of eigenvector i is in proportion to 1 / Π_{j≠i} (θ_i − θ_j).
    """
    distance = np.abs(theta[:, None] - theta) + np.eye(len(theta))
    logs = -np.log(w) - 2 * np.log(distance).sum(axis=1)
    squares = np.exp(logs - logs.max())
    return np.sqrt(squares / squares.sum())


def _from_the_top(
    columns: np.ndarray, probe: np.ndarray, num_probes: int, size: float, width: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Groups that stand apart: their nodes, and the number of eigenvalues by each probe.

    Args:
        columns: nodes in descending order, eigenvalues at each by its probe, and residuals: (3, M).
        size: number of eigenvalues.
    """
    theta, number, residual = columns
    groups, start, left = [], 0, size
    for stop in range(num_probes, len(theta)):
        members = np.bincount(probe[start:stop], minlength=num_probes)
        if members.max() > MAX_MEMBERS:
            break
        gap = theta[stop - 1] - theta[stop]
        vague = max(theta[start] - theta[stop - 1], residual[start:stop].max())
        count = np.bincount(probe[start:stop], weights=number[start:stop], minlength=num_probes)
        inside = max(left - count.mean() - 1, 1.0)
        least = max(RESOLVED * width, MIN_GAP * (theta[stop] - theta[-1]) / inside)
        if members.min() == members.max() and vague <= ISOLATED * gap and gap > least:
            if count.mean() > MAX_EIGENVALUES:
                break
            groups.append((theta[start:stop], count))
            start, left = stop, left - count.mean()
    return groups

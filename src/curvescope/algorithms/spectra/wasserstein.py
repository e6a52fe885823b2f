"""Wasserstein-1 distance between two spectra.

With F and G the shares of eigenvalues up to x,

    W₁ = ∫ |F(x) − G(x)| dx,

the mean distance that eigenvalues move when one spectrum is turned into the other: Σ |λᵢ − μᵢ| / n, both
sorted. By Hoffman and Wielandt W₁ ≤ ‖A − B‖_F / √n for symmetric A and B. Between two quadratures, which are
sums of point masses, it is a finite sum, computed as it stands and without broadening.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from curvescope.algorithms.estimates.intervals import jackknife, student
from curvescope.algorithms.spectra.density import SpectralDensity
from curvescope.core.errors import UsageError
from curvescope.core.result import Result

MIN_REMAINDER = 1e-12  # relative to the largest node: a smaller remainder of a vector is rounding


@dataclass(frozen=True)
class SpectralDistance(Result):
    """W₁ between two spectra from the same probes.

    `low` and `high` hold the distance of the quadratures' expectations 95 times in 100. Few Lanczos steps add
    another error: `least` and `most` are the range of the values after each step of the last half.
    `unresolved` bounds this error: between the outermost nodes, the distance of the probes' exact measures
    differs by at most this. All errors of two exact spectra are zero.
    """

    value: float
    stderr: float  # by leaving out one probe at a time; nan for one probe
    bias: float  # from the same jackknife: noise makes equal spectra look different
    low: float
    high: float
    least: float
    most: float
    unresolved: float
    num_probes: int  # 0: both are exact

    @property
    def error(self) -> float:
        """Total error: the standard error, and the change over the last half of the steps."""
        return math.hypot(self.stderr, max(self.most - self.value, self.value - self.least))


def wasserstein(p: SpectralDensity, q: SpectralDensity) -> SpectralDistance:
    """W₁ between two spectra; a probe is left out of both at once, since they may share it."""
    counts = {len(d.nodes) for d in (p, q) if not d.exact}
    if len(counts) > 1:
        raise UsageError(f"expected spectra from the same number of probes, got {sorted(counts)}")
    value = point_distance(*_pooled(p), *_pooled(q))
    if not counts:
        return SpectralDistance(value, 0.0, 0.0, value, value, value, value, 0.0, 0)
    count = counts.pop()
    unresolved, values = _unresolved(p) + _unresolved(q), [*_distances_of_fewer_steps(p, q), value]
    steps = min(values), max(values)
    if count == 1:
        return SpectralDistance(value, math.nan, math.nan, math.nan, math.nan, *steps, unresolved, 1)
    without = np.array([point_distance(*_pooled(p, i), *_pooled(q, i)) for i in range(count)])
    stderr, bias = (float(x) for x in jackknife(value, without))
    half, center = student(count - 1) * stderr, max(value - bias, 0.0)
    ends = max(center - half, 0.0), center + half
    return SpectralDistance(value, stderr, bias, *ends, *steps, unresolved, count)


def point_distance(x: np.ndarray, v: np.ndarray, y: np.ndarray, w: np.ndarray) -> float:
    """W₁ between Σ vᵢ δ(xᵢ) and Σ wᵢ δ(yᵢ), each of total mass one, in any order."""
    points = np.concatenate([x, y])
    order = np.argsort(points, kind="stable")
    excess = np.cumsum(np.concatenate([v, -w])[order])[:-1]
    return float(np.abs(excess) @ np.diff(points[order]))


def _pooled(d: SpectralDensity, left_out: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of all probes but one as a single measure."""
    nodes, weights = d.nodes, d.weights
    if left_out is not None and not d.exact:
        nodes, weights = np.delete(nodes, left_out, axis=0), np.delete(weights, left_out, axis=0)
    return nodes.ravel(), weights.ravel() / weights.sum()


def _distances_of_fewer_steps(p: SpectralDensity, q: SpectralDensity) -> list[float]:
    """Distances after each step of the last half of the Lanczos steps, except the last step."""
    num_steps = max(d.nodes.shape[1] for d in (p, q) if not d.exact)
    return [
        point_distance(*_cut(p, steps), *_cut(q, steps)) for steps in range(max(1, num_steps // 2), num_steps)
    ]


def _cut(d: SpectralDensity, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights after fewer Lanczos steps, of all probes together."""
    if d.exact or steps >= d.nodes.shape[1]:
        return _pooled(d)
    rows = [coarser_quadrature(x, w, steps) for x, w in zip(d.nodes, d.weights, strict=True)]
    nodes, weights = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return nodes, weights / weights.sum()


def coarser_quadrature(nodes: np.ndarray, weights: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The Gauss quadrature of fewer steps: Lanczos on diag(nodes) from √weights, which has the same T."""
    q = np.sqrt(weights / weights.sum())
    Q, alpha, beta = [q], [], []
    for _ in range(steps):
        v = nodes * Q[-1]
        alpha.append(float(Q[-1] @ v))
        for _ in range(2):
            v = v - np.stack(Q).T @ (np.stack(Q) @ v)
        size = float(np.linalg.norm(v))
        if len(alpha) == steps or size <= MIN_REMAINDER * float(np.abs(nodes).max()):
            break
        beta.append(size)
        Q.append(v / size)
    theta, S = np.linalg.eigh(np.diag(alpha) + np.diag(beta, 1) + np.diag(beta, -1))
    return theta, S[0] ** 2


def _unresolved(d: SpectralDensity) -> float:
    """∫ of the largest difference that the bounds of Chebyshev, Markov and Stieltjes leave, between nodes."""
    if d.exact:
        return 0.0
    edges = np.unique(d.nodes[d.weights > 0])
    if len(edges) < 2:
        return 0.0
    c = d.cumulative((edges[1:] + edges[:-1]) / 2)
    return float(np.maximum(c.share - c.low, c.high - c.share) @ np.diff(edges))

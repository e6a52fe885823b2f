"""Differences between the spectra of blocks: Jensen–Shannon divergences of their densities.

The module needs only densities, no networks or operators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from curvescope.algorithms.estimates.intervals import jackknife, student
from curvescope.algorithms.spectra.density import SpectralDensity
from curvescope.core.errors import UsageError
from curvescope.core.result import Tabular

WIDTH = 0.25  # of the Gaussian, in the coordinate asinh(λ / c): far from zero, a quarter of the eigenvalue
POINTS_PER_WIDTH = 5
MARGIN = 6.0  # widths beyond the outermost nodes


@dataclass(frozen=True)
class Heterogeneity(Tabular):
    """Jensen–Shannon divergences, in bits, between the spectra of B blocks."""

    names: list[str]
    divergence: np.ndarray  # (B, B) symmetric, zero diagonal, from 0 (equal) to 1 (no overlap)
    stderr: np.ndarray  # (B, B) by leaving out one probe at a time; nan with a single probe
    bias: np.ndarray  # (B, B) from the same jackknife: noise makes equal spectra look different
    mean: float  # mean over the pairs
    mean_stderr: float
    width: float
    num_probes: int = 0  # probes of every inexact spectrum; 0 in results of version 0.1

    @property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """Ends of 95 % intervals, (B, B) each, without the bias; nan from one probe or an unknown number."""
        half = student(self.num_probes - 1) * self.stderr
        center = self.divergence - self.bias
        return np.clip(center - half, 0.0, 1.0), np.clip(center + half, 0.0, 1.0)

    def table(self) -> Any:
        """One row per pair of blocks."""
        return [
            {
                "block": self.names[a],
                "other": self.names[b],
                "JS": self.divergence[a, b],
                "±": self.stderr[a, b],
                "bias": self.bias[a, b],
            }
            for a, b in combinations(range(len(self.names)), 2)
        ]


def heterogeneity(densities: Mapping[str, SpectralDensity], *, width: float = WIDTH) -> Heterogeneity:
    """Divergences between all pairs of spectra, with their uncertainty over the probes.

    With p and q the densities of two blocks and h the entropy in bits,

        JS(p, q) = h((p + q) / 2) − (h(p) + h(q)) / 2,

    which does not depend on the coordinate that the densities are written in. It does depend on their
    broadening: p and q are broadened by a Gaussian of standard deviation `width` in x = asinh(λ / c) and put
    on one grid of x, where c is the larger of the two root mean square eigenvalues. So eigenvalues much
    smaller than c are distinguished if they differ by width · c, and large ones if they differ by a factor 1
    + width. A smaller c would need more resolution near zero than Lanczos has, and the divergence would
    depend on the number of steps. The result for a pair does not depend on other blocks.

    The spectra are those of stochastic Lanczos quadrature: each of P probes gives a measure, p is their mean.
    The error is the jackknife's: with J_i the divergence without probe i (in both blocks, which may share
    their random numbers) and J̄ the mean of these, √((P − 1)/P Σ (J_i − J̄)²). The bias is (P − 1)(J̄ − J).
    Exact spectra are not resampled.
    """
    names = list(densities)
    if len(names) < 2:
        raise UsageError(f"expected at least two spectra to compare, got {len(names)}")
    counts = {d.nodes.shape[0] for d in densities.values() if not d.exact} or {
        2
    }  # exact spectra fit any number of probes
    if len(counts) > 1:
        raise UsageError(f"expected spectra from the same number of probes, got {sorted(counts)}")
    count, B = counts.pop(), len(names)
    samples = np.zeros((count, B, B))  # without probe i
    value = np.zeros((B, B))
    for a, b in combinations(range(B), 2):
        divergence, divergences_without = _pair(densities[names[a]], densities[names[b]], width, count)
        value[a, b] = value[b, a] = divergence
        samples[:, a, b] = samples[:, b, a] = divergences_without
    stderr, bias = jackknife(value, samples)
    np.fill_diagonal(stderr, 0.0)
    np.fill_diagonal(bias, 0.0)
    upper = np.triu_indices(B, k=1)
    mean_stderr, _ = jackknife(value[upper].mean(), samples[:, upper[0], upper[1]].mean(axis=1))
    mean = float(value[upper].mean())
    return Heterogeneity(names, value, stderr, bias, mean, float(mean_stderr), width, count)


def spectra_divergence(one: np.ndarray, other: np.ndarray, *, width: float = WIDTH) -> float:
    """Divergence of two spectra as in `heterogeneity`, from all their eigenvalues, (n,) and (m,)."""
    spectra = [np.asarray(values, dtype=float) for values in (one, other)]
    scale = max(math.sqrt(float((values**2).mean())) for values in spectra) or 1.0
    positions = [np.arcsinh(values / scale)[None] for values in spectra]
    grid = _grid(positions, width)
    return js_divergence(grid, *(_smooth(grid, x, np.full_like(x, 1 / x.size), width)[0] for x in positions))


def _grid(positions: Sequence[np.ndarray], width: float) -> np.ndarray:
    """Return evenly spaced points over all nodes with a margin on either side."""
    low, high = min(x.min() for x in positions), max(x.max() for x in positions)
    num_points = math.ceil(((high - low) / width + 2 * MARGIN) * POINTS_PER_WIDTH) + 1
    return np.linspace(low - MARGIN * width, high + MARGIN * width, num_points)


def _pair(p: SpectralDensity, q: SpectralDensity, width: float, count: int) -> tuple[float, np.ndarray]:
    """Return the divergence of two spectra, and its values without each of the first `count` probes."""
    scale = math.sqrt(max(float(p.moments[1]), float(q.moments[1]))) or 1.0
    positions = [np.arcsinh(d.nodes / scale) for d in (p, q)]
    grid = _grid(positions, width)
    density_p, density_q = (
        _smooth(grid, x, d.weights, width) for x, d in zip(positions, (p, q), strict=True)
    )
    divergence = js_divergence(grid, density_p.mean(axis=0), density_q.mean(axis=0))
    if count == 1:
        return divergence, np.full(1, divergence)
    densities_without = (
        [_without(density_p, p.exact, i) for i in range(count)],
        [_without(density_q, q.exact, i) for i in range(count)],
    )
    return divergence, np.array([js_divergence(grid, a, b) for a, b in zip(*densities_without, strict=True)])


def _without(samples: np.ndarray, exact: bool, i: int) -> np.ndarray:
    """Return the mean density of all probes except i."""
    return samples[0] if exact else np.delete(samples, i, axis=0).mean(axis=0)


def _smooth(grid: np.ndarray, nodes: np.ndarray, weights: np.ndarray, width: float) -> np.ndarray:
    """Σ wᵢ N(x; xᵢ, width²) on the grid for each probe: (P, points)."""
    rows = [
        np.exp(-0.5 * ((grid[:, None] - x) / width) ** 2) @ w for x, w in zip(nodes, weights, strict=True)
    ]
    return np.stack(rows) / (width * math.sqrt(2 * math.pi))


def js_divergence(grid: np.ndarray, p: np.ndarray, q: np.ndarray) -> float:
    """h((p + q) / 2) − (h(p) + h(q)) / 2 in bits, of densities that vanish at the ends of an even grid."""
    middle = (p + q) / 2
    terms = (_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2
    return float(max(terms.sum() * (grid[1] - grid[0]), 0.0))


def _relative_entropy(p: np.ndarray, m: np.ndarray) -> np.ndarray:
    """p log₂(p / m) at each point; zero if p is zero."""
    ratio = np.divide(p, m, out=np.ones_like(p), where=(p > 0) & (m > 0))
    return p * np.log2(ratio)

"""Both ends of a spectrum, its bulk and its outliers, from a few Lanczos runs of their own probes.

A run of m steps from a random vector v gives nodes θᵢ and weights wᵢ with Σ wᵢ f(θᵢ) = vᵀ f(A) v / n for
polynomials f of degree below 2m, and nearly so for smooth f. Outliers are counted softly, by f = φ(λ/τ),

    φ(x) = x⁴ / (1 + x⁴),    outliers N = tr φ(A/τ),    bulk width = √(tr[A² (1 − φ(A/τ))] / (n − N)),

because a sharp threshold in the middle of a tail is known from no few steps. The width is a root mean square:
that of eigenvalues below τ, in which outliers count no more than τ does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from curvescope.algorithms import lanczos
from curvescope.core.operator import LinearOperator
from curvescope.core.result import Result
from curvescope.core.seeds import probes

ROUNDINGS = 16  # of the largest Ritz value: products are not more exact than that
EARLIER = 2  # steps less, to see what the last ones changed


class Ends(NamedTuple):
    """An eigenvalue lies within an error of each end; λ_max is not below `top`, nor λ_min above `bottom`."""

    top: np.ndarray  # (X,)
    top_error: np.ndarray
    bottom: np.ndarray
    bottom_error: np.ndarray


class Split(NamedTuple):
    """Bulk and outliers, probe by probe."""

    width: np.ndarray  # (X, P)
    outliers: np.ndarray  # (X, P)


@dataclass(frozen=True)
class Lines(Result):
    """P Lanczos runs of at most m steps on each of X operators of one size."""

    alpha: np.ndarray  # (X, P, m)
    beta: np.ndarray  # (X, P, m); the last one couples to the vector that was not used
    lengths: np.ndarray  # (X, P) steps until a space was exhausted
    size: int  # n
    eps: float  # a rounding of the products

    @property
    def num_steps(self) -> int:
        """m."""
        return self.alpha.shape[-1]

    def ends(self) -> Ends:
        """The outermost Ritz values over the probes of each operator, with their residuals."""
        found = []
        for x in range(len(self.alpha)):
            runs = [self._run(x, p, self.num_steps) for p in range(self.alpha.shape[1])]
            high = max(runs, key=lambda run: run[0][-1])
            low = min(runs, key=lambda run: run[0][0])
            rounding = ROUNDINGS * self.eps * max(abs(high[0][-1]), abs(low[0][0]))
            found.append((high[0][-1], high[2][-1] + rounding, low[0][0], low[2][0] + rounding))
        return Ends(*np.array(found).T)

    def split(self, tau: np.ndarray, *, earlier: int = 0) -> Split:
        """Bulk and outliers at the thresholds τ (X,); `earlier` leaves out that many of the last steps."""
        width, outliers = np.zeros(self.lengths.shape), np.zeros(self.lengths.shape)
        for x, p in np.ndindex(*self.lengths.shape):
            theta, weights, _ = self._run(x, p, max(1, self.num_steps - earlier))
            far = (theta / tau[x]) ** 4
            outliers[x, p] = self.size * (weights * far / (1 + far)).sum()
            squares = self.size * (weights * theta**2 / (1 + far)).sum()
            width[x, p] = np.sqrt(squares / (self.size - outliers[x, p]))
        return Split(width, outliers)

    def _run(self, x: int, p: int, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Nodes (ascending), weights and residuals of one run."""
        m = min(int(self.lengths[x, p]), steps)
        below = np.diag(self.beta[x, p, : m - 1], -1)
        theta, S = np.linalg.eigh(np.diag(self.alpha[x, p, :m]) + below + below.T)
        return theta, S[0] ** 2, self.beta[x, p, m - 1] * np.abs(S[-1])


def measure_lines(op: LinearOperator, *, num_probes: int, num_steps: int, seed: int) -> Lines:
    """Of one operator, X = 1; equal seeds are equal probes, whatever the operator is."""
    start = probes(op.shape[0], num_probes, seed=seed, dtype=op.dtype, device=op.device)
    found = lanczos(op, start, num_steps)
    eps = torch.finfo(op.dtype).eps
    return Lines(found.alpha[None], found.beta[None], found.lengths[None], op.shape[0], eps)


def stacked(lines: list[Lines]) -> Lines:
    """Several of one shape as one."""
    return Lines(
        alpha=np.concatenate([one.alpha for one in lines]),
        beta=np.concatenate([one.beta for one in lines]),
        lengths=np.concatenate([one.lengths for one in lines]),
        size=lines[0].size,
        eps=lines[0].eps,
    )

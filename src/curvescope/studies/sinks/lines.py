"""Both ends of a spectrum, its bulk and its outliers, from a few Lanczos runs of their own probes.

A run of m steps from a random vector v gives nodes θᵢ and weights wᵢ with Σ wᵢ f(θᵢ) = vᵀ f(A) v / n for
polynomials f of degree below 2m, and nearly so for smooth f. Outliers are counted softly, by f = φ(λ/τ),

    φ(x) = x⁴ / (1 + x⁴),    outliers N = tr φ(A/τ),    bulk width = √(tr[A² (1 − φ(A/τ))] / (n − N)),

because a sharp threshold in the middle of a tail is known from no few steps. The width is a root mean square:
that of eigenvalues below τ, in which outliers count no more than τ does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from curvescope.algorithms import lanczos
from curvescope.algorithms.checks import GIB
from curvescope.core.operator import LinearOperator
from curvescope.core.result import Result
from curvescope.core.seeds import probes

ROUNDINGS = 16  # of the largest Ritz value: products are not more exact than that
EARLIER = 2  # steps less, to see what the last ones changed
NOTHING = 1e-25  # a weight of rounding: of what lies beyond an exhausted space
BASIS_GIB = 4  # memory that bases may take; above, vectors are orthogonal to the last two alone


Nodes = tuple[np.ndarray, np.ndarray, np.ndarray]


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
        return self._ends

    @cached_property
    def _ends(self) -> Ends:
        theta, weights, residuals = (part.reshape(len(self.alpha), -1) for part in self._nodes(0))
        there = weights > NOTHING
        row = np.arange(len(theta))
        high, low = (np.where(there, sign * theta, -np.inf).argmax(1) for sign in (1, -1))
        rounding = ROUNDINGS * self.eps * np.maximum(np.abs(theta[row, high]), np.abs(theta[row, low]))
        errors = [residuals[row, at] + rounding for at in (high, low)]
        return Ends(theta[row, high], errors[0], theta[row, low], errors[1])

    def split(self, tau: np.ndarray, *, earlier: int = 0) -> Split:
        """Bulk and outliers at the thresholds τ (X,); `earlier` leaves out that many of the last steps."""
        theta, weights, _ = self._nodes(earlier)
        far = (theta / tau[:, None, None]) ** 4
        outliers = self.size * (weights * far / (1 + far)).sum(-1)
        squares = self.size * (weights * theta**2 / (1 + far)).sum(-1)
        return Split(np.sqrt(squares / (self.size - outliers)), outliers)

    def _nodes(self, earlier: int) -> Nodes:
        """Nodes, weights and residuals of all runs, (X, P, m) each; those of a space's end weigh nothing."""
        if earlier not in self._found:
            self._found[earlier] = self._diagonalized(earlier)
        return self._found[earlier]

    @cached_property
    def _found(self) -> dict[int, Nodes]:
        return {}

    def _diagonalized(self, earlier: int) -> Nodes:
        m = max(1, self.num_steps - earlier)
        T = np.zeros((*self.lengths.shape, m, m))
        steps = np.arange(m)
        T[..., steps, steps] = self.alpha[..., :m]
        T[..., steps[1:], steps[:-1]] = self.beta[..., : m - 1]
        theta, S = np.linalg.eigh(T)  # reads the lower triangle
        return theta, S[..., 0, :] ** 2, self.beta[..., m - 1, None] * np.abs(S[..., -1, :])


def measure_lines(op: LinearOperator, *, num_probes: int, num_steps: int, seed: int, first: int = 0) -> Lines:
    """Of one operator, X = 1; equal seeds are equal probes, from number `first` on, whatever it is."""
    start = probes(op.shape[0], num_probes, seed=seed, first=first, dtype=op.dtype, device=op.device)
    kept = basis_length(op, num_probes, num_steps) > num_steps
    found = lanczos(op, start, num_steps, reorthogonalize=kept)
    eps = torch.finfo(op.dtype).eps
    return Lines(found.alpha[None], found.beta[None], found.lengths[None], op.shape[0], eps)


def basis_length(op: LinearOperator, num_probes: int, num_steps: int) -> int:
    """Vectors that each run keeps: all, or the last two where all of them take too much memory."""
    size = num_probes * (num_steps + 1) * op.shape[0] * op.dtype.itemsize
    return num_steps + 1 if size <= BASIS_GIB * GIB else 2


def stacked(lines: list[Lines]) -> Lines:
    """Several of one shape as one."""
    return Lines(
        alpha=np.concatenate([one.alpha for one in lines]),
        beta=np.concatenate([one.beta for one in lines]),
        lengths=np.concatenate([one.lengths for one in lines]),
        size=lines[0].size,
        eps=lines[0].eps,
    )

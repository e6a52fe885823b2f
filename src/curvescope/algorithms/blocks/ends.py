"""Both ends of a spectrum from a few Lanczos steps, with bounds that hold 95 times in 100.

The largest Ritz value θ of a Krylov space is never above λ_max, and an eigenvalue lies within its residual.
That it is λ_max itself no residual can say. The random start q can: an eigenvector u of λ > θ has

    (uᵀ q)² ≤ (Π β / Π (λ − θᵢ))² / (1 + Σ (rᵢ / (λ − θᵢ))²)

over all β and all Ritz values θᵢ with residuals rᵢ (the Christoffel function), which falls as λ moves
outwards, and a random q has (uᵀ q)² < π p² / 2n with probability at most p. So λ_max is at most the λ where
the two meet, but for a probability of p, whatever the spectrum.

The eigenvalues of an operator that is nothing but rounding, see `rounding`, are said to be zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.checks import GIB, check_symmetric, of_one_matrix
from curvescope.algorithms.estimates.intervals import CONFIDENCE
from curvescope.algorithms.rounding import is_rounding
from curvescope.algorithms.spectra.krylov import Recurrence
from curvescope.algorithms.vectors import random_vector, vector_bytes
from curvescope.core.operator import LinearOperator
from curvescope.core.progress import track
from curvescope.core.result import Result

BASIS_GIB = 4  # memory that a basis may take; fewer steps where it would take more
ROUNDINGS = 16  # of the largest Ritz value: products are not more exact than that
HALVINGS = 40  # of the interval that the bound is looked for in


class Krylov(NamedTuple):
    """A Krylov space: A Qᵀ = [Qᵀ q] T."""

    Q: Tensor  # (m, n) orthonormal rows
    T: np.ndarray  # (m + 1, m); its last row holds β, which is zero if the space is exhausted
    asymmetry: float  # ‖K − Kᵀ‖_F / 2 of K = Q A Qᵀ, as measured


@dataclass(frozen=True)
class Ends(Result):
    """The lowest and the highest eigenvalue: there is one within `residuals` of each of `values`.

    λ_min is at most values[0] and at least `low`, λ_max at least values[1] and at most `high`, each at least
    95 times in 100. All of these agree where the matrix was written out. Where it is nothing but rounding,
    both values are zero, and the residuals its size.
    """

    values: np.ndarray  # (2,)
    residuals: np.ndarray  # (2,)
    low: float
    high: float


@of_one_matrix
def extreme_ends(op: LinearOperator, *, num_steps: int = 16, seed: int = 0) -> Ends:
    """Both ends of the spectrum of a symmetric operator, from `num_steps` products."""
    check_symmetric(op, "extreme_ends")
    return ritz_ends(krylov_basis(op, num_steps, seed=seed), op)


def krylov_basis(op: LinearOperator, num_steps: int, *, seed: int) -> Krylov:
    """Of m Lanczos steps on a Gaussian vector.

    There are fewer than `num_steps` where the space is exhausted or the basis would not fit.
    """
    check_symmetric(op, "krylov_basis")
    steps = max(1, min(num_steps, op.shape[0], BASIS_GIB * GIB // vector_bytes(op) - 1))
    recurrence = Recurrence(op, op.local_shape[0], 1, steps)
    random_vector(op, seed=seed, index=0, out=recurrence.vectors[:, 0])
    recurrence.begin()
    for _ in track(range(steps), "Lanczos"):
        recurrence.advance(op @ recurrence.vectors)
        if not recurrence.alive[0]:
            break
    found = recurrence.finish()
    m = int(found.lengths[0])
    alpha, beta = found.alpha[0, :m], found.beta[0, :m]
    T = np.zeros((m + 1, m))
    T[:m] = np.diag(alpha) + np.diag(beta[:-1], 1)
    T[np.arange(1, m + 1), np.arange(m)] = beta
    return Krylov(recurrence.rows[0, :m], T, float(recurrence.asymmetry[0]))


def ritz_ends(krylov: Krylov, op: LinearOperator) -> Ends:
    """From a Krylov space of an operator."""
    T = krylov.T
    theta, S = np.linalg.eigh(T[:-1])
    if is_rounding(T[:-1], krylov.asymmetry):
        return zero_ends(theta, op)
    rounding = ROUNDINGS * torch.finfo(op.dtype).eps * float(np.abs(theta).max())
    beta = np.diag(T, -1)
    residuals = beta[-1] * np.abs(S[-1])
    high = _bound(theta, residuals, beta, op.shape[0]) + rounding
    low = -_bound(-theta[::-1], residuals[::-1], beta, op.shape[0]) - rounding
    low = max(low, 0.0) if op.psd else low
    return Ends(theta[[0, -1]], residuals[[0, -1]] + rounding, low, high)


def zero_ends(values: np.ndarray, op: LinearOperator) -> Ends:
    """Of eigenvalues that are rounding: zero, up to the largest of them."""
    size = float(np.abs(values).max())
    return Ends(np.zeros(2), np.full(2, size), 0.0 if op.psd else -size, size)


def _bound(theta: np.ndarray, residuals: np.ndarray, beta: np.ndarray, size: int) -> float:
    """What the largest eigenvalue exceeds with a probability of at most 5 %, for ascending Ritz values."""
    top, unlikely = float(theta[-1]), math.log(math.pi / (2 * size)) + 2 * math.log(1 - CONFIDENCE)
    if beta[-1] == 0:
        return top  # the space is invariant, and a random vector has a part in all eigenspaces

    def overlooked(step: float) -> bool:
        away = step + (top - theta)
        log_overlap = 2 * (np.log(beta).sum() - np.log(away).sum())
        return log_overlap - math.log1p(float(((residuals / away) ** 2).sum())) > unlikely

    near, far = 0.0, max(float(np.ptp(theta)), float(residuals.max()))
    while overlooked(far):
        near, far = far, 2 * far
    for _ in range(HALVINGS):
        middle = (near + far) / 2
        near, far = (middle, far) if overlooked(middle) else (near, middle)
    return top + far

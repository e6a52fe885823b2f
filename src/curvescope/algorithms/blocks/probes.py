"""Trace, Frobenius norm and extreme eigenvalues of one diagonal block, together from a few products.

The matrix of a small block is computed exactly, with one product per row. For a larger block A (n, n),
Lanczos from a random vector gives an orthonormal Q (n, m) with A Q = Q T + β q eᵀ, and T (m, m) gives the
ends of the spectrum. With P = I − Q Qᵀ,

    tr A = tr T + tr(P A P),    ‖A‖² = ‖T‖² + β² + ‖A P‖²,

so probes estimate only the part outside Q. Q contains a dominating eigenvector, which would make the samples
skewed (Chen and Hallman 2023). Probes do not depend on Q, so both estimates are unbiased.

Both ends of a spectrum also follow from a few Lanczos steps, with bounds that hold 95 times in 100.

The largest Ritz value θ of a Krylov space is never above λ_max, and an eigenvalue lies within its residual. A
residual cannot show that θ is λ_max itself, but the random start q can: an eigenvector u of λ > θ has

    (uᵀ q)² ≤ (Π β / Π (λ − θᵢ))² / (1 + Σ (rᵢ / (λ − θᵢ))²)

over all β and all Ritz values θᵢ with residuals rᵢ (the Christoffel function), which falls as λ moves
outwards, and a random q has (uᵀ q)² < π p² / 2n with probability at most p. So with probability 1 − p, λ_max
is at most the λ where the two bounds are equal, for any spectrum.

If an operator is only rounding errors (`is_rounding`), its eigenvalues are reported as zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.accurate_sums import frobenius_length, is_rounding, sum_over_ranks
from curvescope.algorithms.checks import (
    GIB,
    check_choice,
    check_count,
    check_square,
    check_symmetric,
    fixed_operator,
)
from curvescope.algorithms.columns import (
    column_dots,
    columns_at_once,
    gather_samples,
    mean_and_stderr,
    probe_batches,
    to_numpy,
)
from curvescope.algorithms.estimates.intervals import (
    CONFIDENCE,
    MeanSquare,
    NeighborCosines,
    column_norms,
    form_interval,
    mean_square,
)
from curvescope.algorithms.spectra.krylov import Recurrence
from curvescope.algorithms.vectors import check_finite, random_vector, vector_bytes
from curvescope.core.operator import LinearOperator
from curvescope.core.progress import track
from curvescope.core.result import Result
from curvescope.core.seeds import Probe

BASIS_GIB = 4  # memory limit of a basis; a larger one gets fewer steps
ROUNDINGS = 16  # in roundings of the largest Ritz value: accuracy of products
HALVINGS = 40  # bisections of the interval that contains the bound


class Krylov(NamedTuple):
    """A Krylov space: A Qᵀ = [Qᵀ q] T."""

    Q: Tensor  # (m, n) orthonormal rows
    T: np.ndarray  # (m + 1, m); its last row holds β, which is zero if the space is exhausted
    asymmetry: float  # ‖K − Kᵀ‖_F / 2 of K = Q A Qᵀ, as measured


@dataclass(frozen=True)
class Ends(Result):
    """Estimates of the smallest and the largest eigenvalue: an eigenvalue lies within `residuals` of each of
    `values`.

    λ_min is at most values[0] and at least `low`, λ_max at least values[1] and at most `high`, each at least
    95 times in 100. All of these are equal if the matrix was computed exactly. If it is only rounding errors,
    both values are zero, and the residuals are its size.
    """

    values: np.ndarray  # (2,)
    residuals: np.ndarray  # (2,)
    low: float
    high: float


@fixed_operator
def extreme_ends(op: LinearOperator, *, num_steps: int = 16, seed: int = 0) -> Ends:
    """Estimate both ends of the spectrum of a symmetric operator from `num_steps` products."""
    check_symmetric(op, "extreme_ends")
    return ritz_ends(krylov_basis(op, num_steps, seed=seed), op)


@fixed_operator
def krylov_basis(op: LinearOperator, num_steps: int, *, seed: int) -> Krylov:
    """Krylov space of m Lanczos steps on a Gaussian vector.

    It takes fewer than `num_steps` steps if the space is exhausted or the basis would not fit.
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
    tridiagonals = recurrence.finish()
    m = int(tridiagonals.lengths[0])
    alpha, beta = tridiagonals.alpha[0, :m], tridiagonals.beta[0, :m]
    T = np.zeros((m + 1, m))
    T[:m] = np.diag(alpha) + np.diag(beta[:-1], 1)
    T[np.arange(1, m + 1), np.arange(m)] = beta
    return Krylov(recurrence.rows[0, :m], T, float(recurrence.asymmetry[0]))


def ritz_ends(krylov: Krylov, op: LinearOperator) -> Ends:
    """Estimate both ends of the spectrum from a Krylov space."""
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
    """Return the ends for eigenvalues that are only rounding: zero, with the largest of them as the error."""
    size = float(np.abs(values).max())
    return Ends(np.zeros(2), np.full(2, size), 0.0 if op.psd else -size, size)


def _bound(theta: np.ndarray, residuals: np.ndarray, beta: np.ndarray, size: int) -> float:
    """Upper bound of the largest eigenvalue with 95 % confidence, from ascending Ritz values."""
    top, unlikely = float(theta[-1]), math.log(math.pi / (2 * size)) + 2 * math.log(1 - CONFIDENCE)
    if beta[-1] == 0:
        return top  # The space is invariant, and a random start overlaps with all eigenspaces.

    def overlooked(step: float) -> bool:
        distance = step + (top - theta)
        log_overlap = 2 * (np.log(beta).sum() - np.log(distance).sum())
        return log_overlap - math.log1p(float(((residuals / distance) ** 2).sum())) > unlikely

    lower, upper = 0.0, max(float(np.ptp(theta)), float(residuals.max()))
    while overlooked(upper):
        lower, upper = upper, 2 * upper
    for _ in range(HALVINGS):
        middle = (lower + upper) / 2
        lower, upper = (middle, upper) if overlooked(middle) else (lower, middle)
    return top + upper


@dataclass(frozen=True)
class OwnProbes(Result):
    """Trace, Frobenius norm (unbiased) and ends of a block, from products with that block alone.

    Each is between its `low` and `high` 95 times in 100, see `intervals`; nan for one probe. All errors of an
    exact block are zero. A block that is only rounding errors (`is_rounding`) has the value zero, with its
    size as the error.
    """

    trace: float
    trace_stderr: float
    norm: float  # the root of the mean of squared_samples
    norm_stderr: float  # to first order
    trace_samples: np.ndarray  # (P,) tr T + vᵀ P A P v; of an exact block (1,)
    squared_samples: np.ndarray  # (P,) ‖T‖² + β² + ‖A P v‖²
    num_products: int
    seed: int
    trace_low: float = math.nan
    trace_high: float = math.nan
    norm_low: float = math.nan
    norm_high: float = math.nan
    ends: Ends | None = None  # None without Lanczos steps, and in results of version 0.1
    exact: bool = False
    probe: str = "rademacher"


@fixed_operator
def own_probes(
    op: LinearOperator,
    *,
    num_probes: int = 8,
    num_steps: int = 0,
    max_exact: int = 0,
    probe: Probe = "rademacher",
    seed: int = 0,
) -> OwnProbes:
    """Trace, Frobenius norm and, with Lanczos steps, the ends of the spectrum of a square operator.

    The variance of vᵀ A v is 2 Σ_{i≠j} A_ij² for symmetric A, and 2 ‖A‖_F² for Gaussian v. A probe shared
    with other blocks adds Σ_c ‖A_bc‖² over the rest of the row. So separate probes are far more accurate for
    a block with little curvature, and the estimated trace of a positive semi-definite block is not negative.

    Memory: num_steps + 1 vectors, and the probes of one product.

    Args:
        num_steps: Lanczos steps, for a symmetric operator; 0 uses probes only.
        max_exact: Operators with at most this many rows are computed exactly, like those with no more rows
            than the estimate would take products.
    """
    check_square(op, "own_probes")
    check_count("num_probes", num_probes, at_least=1)
    check_count("num_steps", num_steps, at_least=0)
    check_count("max_exact", max_exact, at_least=0)
    check_choice("probe", probe, get_args(Probe))
    if op.shape[0] <= max_exact or (num_steps and op.shape[0] <= num_probes + num_steps):
        return _exact_estimate(op, seed)
    Q, T, ends, zero = None, np.zeros((1, 0)), None, False
    if num_steps:
        krylov = krylov_basis(op, num_steps, seed=seed)
        Q, T, ends = krylov.Q, krylov.T, ritz_ends(krylov, op)
        zero = is_rounding(T[:-1], krylov.asymmetry)
    forms, lengths, cosines = [], [], NeighborCosines(num_probes)
    for V in probe_batches(op, num_probes, seed=seed, kind=probe, first=min(num_steps, 1), what="norm"):
        V = V if Q is None else _outside(V, Q)
        product = op @ V
        forms.append(column_dots(V, product))
        lengths.append(column_norms(product))
        cosines.add(product, lengths[-1])
    outer = mean_square(gather_samples(lengths), cosines.gathered())
    estimate = _estimates(op, T, gather_samples(forms), outer, seed, num_probes + T.shape[1], ends)
    return replace(_zero_estimate(estimate, op) if zero else estimate, probe=probe)


def _outside(V: Tensor, Q: Tensor) -> Tensor:
    """Project columns (n, k) onto the complement of the orthonormal rows of Q (m, n)."""
    return V - Q.T @ sum_over_ranks(Q @ V)


def _estimates(
    op: LinearOperator,
    T: np.ndarray,
    forms: np.ndarray,
    outer: MeanSquare,
    seed: int,
    products: int,
    ends: Ends | None,
) -> OwnProbes:
    """Combine T (m + 1, m), with β below it, and samples of the rest."""
    inside, size = float(np.trace(T)), frobenius_length(T)
    outside, trace_stderr = mean_and_stderr(forms)
    positive, degrees = op.psd and float(outside) > 0, len(forms) - 1
    low, high = form_interval(
        float(outside), float(trace_stderr), float(outer.root), degrees, positive=positive
    )
    norm = math.hypot(size, float(outer.root))
    with np.errstate(over="ignore", under="ignore"):
        squares = np.square(size) + outer.samples
    return OwnProbes(
        trace=inside + float(outside),
        trace_stderr=float(trace_stderr),
        norm=norm,
        norm_stderr=float(outer.root_stderr) * (float(outer.root) / norm if norm > 0 else 1.0),
        trace_samples=inside + forms,
        squared_samples=squares,
        num_products=products,
        seed=seed,
        trace_low=inside + float(low),
        trace_high=inside + float(high),
        norm_low=math.hypot(size, float(outer.low)),
        norm_high=math.hypot(size, float(outer.high)),
        ends=ends,
    )


def _zero_estimate(estimate: OwnProbes, op: LinearOperator) -> OwnProbes:
    """Return the estimate for a block that is only rounding: zero, with the measured size as the error."""
    size = max(
        abs(estimate.trace), abs(estimate.trace_low), abs(estimate.trace_high)
    )  # max ignores a later nan
    return replace(
        estimate,
        trace=0.0,
        trace_stderr=size,
        trace_low=0.0 if op.psd else -size,
        trace_high=size,
        norm=0.0,
        norm_stderr=estimate.norm,
        norm_low=0.0,
        norm_high=max(estimate.norm, estimate.norm_high),
    )


def _exact_estimate(op: LinearOperator, seed: int) -> OwnProbes:
    """Compute the numbers from the matrix itself."""
    A = to_numpy(op.to_dense(chunk=columns_at_once(op)))
    check_finite(A)
    trace, norm = float(np.trace(A)), frobenius_length(A)
    ends, zero = None, False
    if op.symmetric:
        values = np.linalg.eigvalsh((A + A.T) / 2)[[0, -1]]
        zero = is_rounding(A, frobenius_length(A - A.T) / 2)
        ends = Ends(values, np.zeros(2), float(values[0]), float(values[1]))
        ends = zero_ends(values, op) if zero else ends
    with np.errstate(over="ignore", under="ignore"):
        squares = np.square(np.array([norm]))
    result = OwnProbes(
        trace=trace,
        trace_stderr=0.0,
        norm=norm,
        norm_stderr=0.0,
        trace_samples=np.array([trace]),
        squared_samples=squares,
        num_products=op.shape[0],
        seed=seed,
        trace_low=trace,
        trace_high=trace,
        norm_low=norm,
        norm_high=norm,
        ends=ends,
        exact=True,
    )
    return _zero_estimate(result, op) if zero else result

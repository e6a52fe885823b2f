"""Trace, Frobenius norm and extreme eigenvalues of one diagonal block, together from a few products.

A block that is small enough is written out: one product per entry, many at a time, and nothing is estimated.
Of a larger one A (n, n), Lanczos from a random vector gives an orthonormal Q (n, m) with A Q = Q T + β q eᵀ,
and T (m, m) the ends of the spectrum. With P = I − Q Qᵀ,

    tr A = tr T + tr(P A P),    ‖A‖² = ‖T‖² + β² + ‖A P‖²,

so only what lies outside Q is left to probes, and a dominating eigenvalue, which would make their samples
skewed, is taken out (Chen and Hallman 2023). Probes do not depend on Q: both estimates have no bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from torch import Tensor

from curvescope.algorithms.blocks.ends import Ends, krylov_basis, ritz_ends, zero_ends
from curvescope.algorithms.checks import check_choice, check_count, check_square, of_one_matrix
from curvescope.algorithms.columns import (
    column_dots,
    columns_at_once,
    gather_samples,
    mean_and_stderr,
    probe_batches,
    to_numpy,
)
from curvescope.algorithms.estimates.intervals import mean_interval, positive_interval
from curvescope.algorithms.estimates.mean_square import column_norms, mean_square
from curvescope.algorithms.rounding import is_rounding, length
from curvescope.algorithms.sums import add_up
from curvescope.algorithms.vectors import check_finite
from curvescope.core.operator import LinearOperator
from curvescope.core.result import Result
from curvescope.core.seeds import Probe


@dataclass(frozen=True)
class OwnProbes(Result):
    """What products with a block A alone say: its trace and Frobenius norm, without bias, and its ends.

    Each is between its `low` and `high` 95 times in 100, see `intervals`; nan for one probe. All errors of
    an exact block are zero. A block that is nothing but rounding, see `rounding`, is zero, up to what was
    found.
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


@of_one_matrix
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

    The variance of vᵀ A v is 2 Σ_{i≠j} A_ij² for symmetric A, and 2 ‖A‖_F² for Gaussian v. A probe that is
    shared with other blocks adds Σ_c ‖A_bc‖² over the rest of the row, so own probes say far more of a block
    with little curvature, and the trace of a positive semi-definite block cannot come out negative.

    Memory: num_steps + 1 vectors, and the probes of one product.

    Args:
        num_steps: of Lanczos, on a symmetric operator; 0 leaves all to the probes.
        max_exact: operators with at most this many rows are written out, as are those with no more rows
            than products would be spent on them.
    """
    check_square(op, "own_probes")
    check_count("num_probes", num_probes, at_least=1)
    check_count("num_steps", num_steps, at_least=0)
    check_count("max_exact", max_exact, at_least=0)
    check_choice("probe", probe, get_args(Probe))
    if op.shape[0] <= max_exact or (num_steps and op.shape[0] <= num_probes + num_steps):
        return _written_out(op, seed)
    Q, T, ends, zero = None, np.zeros((1, 0)), None, False
    if num_steps:
        krylov = krylov_basis(op, num_steps, seed=seed)
        Q, T, ends = krylov.Q, krylov.T, ritz_ends(krylov, op)
        zero = is_rounding(T[:-1], krylov.asymmetry)
    forms, lengths = [], []
    for V in probe_batches(op, num_probes, seed=seed, kind=probe, first=min(num_steps, 1), what="norm"):
        V = V if Q is None else _outside(V, Q)
        product = op @ V
        forms.append(column_dots(V, product))
        lengths.append(column_norms(product))
    found = _estimates(
        op, T, gather_samples(forms), gather_samples(lengths), seed, num_probes + T.shape[1], ends
    )
    return replace(_zero(found, op) if zero else found, probe=probe)


def _outside(V: Tensor, Q: Tensor) -> Tensor:
    """The columns (n, k) without their part in the orthonormal rows of Q (m, n)."""
    return V - Q.T @ add_up(Q @ V)


def _estimates(
    op: LinearOperator,
    T: np.ndarray,
    forms: np.ndarray,
    lengths: np.ndarray,
    seed: int,
    products: int,
    ends: Ends | None,
) -> OwnProbes:
    """What is known inside, from T (m + 1, m) with β below it, and samples of the rest."""
    inside, size = float(np.trace(T)), length(T)
    rest, trace_stderr = mean_and_stderr(forms)
    around = positive_interval if op.psd and rest > 0 else mean_interval
    low, high = around(rest, trace_stderr, len(forms) - 1)
    outer = mean_square(lengths)
    norm = math.hypot(size, float(outer.root))
    with np.errstate(over="ignore", under="ignore"):
        squares = np.square(size) + outer.samples
    return OwnProbes(
        trace=inside + float(rest),
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


def _zero(found: OwnProbes, op: LinearOperator) -> OwnProbes:
    """What is said of a block that is nothing but rounding: zero, up to what was found."""
    size = max(abs(found.trace), abs(found.trace_low), abs(found.trace_high))  # nan does not count
    return replace(
        found,
        trace=0.0,
        trace_stderr=size,
        trace_low=0.0 if op.psd else -size,
        trace_high=size,
        norm=0.0,
        norm_stderr=found.norm,
        norm_low=0.0,
        norm_high=max(found.norm, found.norm_high),
    )


def _written_out(op: LinearOperator, seed: int) -> OwnProbes:
    """From the matrix itself."""
    A = to_numpy(op.to_dense(chunk=columns_at_once(op)))
    check_finite(A)
    trace, norm = float(np.trace(A)), length(A)
    ends, zero = None, False
    if op.symmetric:
        values = np.linalg.eigvalsh((A + A.T) / 2)[[0, -1]]
        zero = is_rounding(A, length(A - A.T) / 2)
        ends = Ends(values, np.zeros(2), float(values[0]), float(values[1]))
        ends = zero_ends(values, op) if zero else ends
    with np.errstate(over="ignore", under="ignore"):
        squares = np.square(np.array([norm]))
    found = OwnProbes(
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
    return _zero(found, op) if zero else found

"""Trace and Frobenius norm of one diagonal block, from the same products with probes of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from curvescope.algorithms.checks import check_count, check_square
from curvescope.algorithms.columns import column_dots, gather_samples, mean_and_stderr, probe_batches
from curvescope.core.operator import LinearOperator
from curvescope.core.result import Result


@dataclass(frozen=True)
class OwnProbes(Result):
    """What probes v of a block A alone say: tr A = E vᵀ A v and ‖A‖_F² = E ‖A v‖², both without bias."""

    trace: float
    trace_stderr: float
    norm: float  # the root of the mean of squared_samples
    norm_stderr: float  # to first order
    trace_samples: np.ndarray  # (P,) vᵀ A v
    squared_samples: np.ndarray  # (P,) ‖A v‖²
    num_products: int
    seed: int


def own_probes(op: LinearOperator, *, num_probes: int = 8, seed: int = 0) -> OwnProbes:
    """Trace and Frobenius norm of a square operator from the same Rademacher probes.

    The variance of vᵀ A v is 2 Σ_{i≠j} A_ij² for symmetric A. A probe that is shared with other blocks adds
    Σ_c ‖A_bc‖² over the rest of the row, so own probes say far more of a block with little curvature.
    """
    check_square(op, "own_probes")
    check_count("num_probes", num_probes, at_least=1)
    dots, squares = [], []
    for V in probe_batches(op, num_probes, seed=seed, what="norm"):
        product = op @ V
        dots.append(column_dots(V, product))
        squares.append(column_dots(product, product))
    trace_samples, squared_samples = gather_samples(dots), gather_samples(squares)
    trace, trace_stderr = (float(x) for x in mean_and_stderr(trace_samples))
    squared, squared_stderr = (float(x) for x in mean_and_stderr(squared_samples))
    norm = math.sqrt(squared)
    return OwnProbes(
        trace=trace,
        trace_stderr=trace_stderr,
        norm=norm,
        norm_stderr=squared_stderr / (2 * norm) if norm > 0 else squared_stderr,
        trace_samples=trace_samples,
        squared_samples=squared_samples,
        num_products=num_probes,
        seed=seed,
    )

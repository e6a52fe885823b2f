"""Trace and Frobenius norm of one diagonal block, from the same products with probes of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from curvescope.algorithms.checks import check_count, check_square, of_one_matrix
from curvescope.algorithms.columns import column_dots, gather_samples, mean_and_stderr, probe_batches
from curvescope.algorithms.estimates.intervals import mean_interval, positive_interval
from curvescope.algorithms.estimates.mean_square import column_norms, mean_square
from curvescope.core.operator import LinearOperator
from curvescope.core.result import Result


@dataclass(frozen=True)
class OwnProbes(Result):
    """What probes v of a block A alone say: tr A = E vᵀ A v and ‖A‖_F² = E ‖A v‖², both without bias.

    Each is between its `low` and `high` 95 times in 100, see `intervals`; nan for one probe.
    """

    trace: float
    trace_stderr: float
    norm: float  # the root of the mean of squared_samples
    norm_stderr: float  # to first order
    trace_samples: np.ndarray  # (P,) vᵀ A v
    squared_samples: np.ndarray  # (P,) ‖A v‖²
    num_products: int
    seed: int
    trace_low: float = math.nan
    trace_high: float = math.nan
    norm_low: float = math.nan
    norm_high: float = math.nan


@of_one_matrix
def own_probes(op: LinearOperator, *, num_probes: int = 8, seed: int = 0) -> OwnProbes:
    """Trace and Frobenius norm of a square operator from the same Rademacher probes.

    The variance of vᵀ A v is 2 Σ_{i≠j} A_ij² for symmetric A. A probe that is shared with other blocks adds
    Σ_c ‖A_bc‖² over the rest of the row, so own probes say far more of a block with little curvature, and
    the trace of a positive semi-definite block cannot come out negative.
    """
    check_square(op, "own_probes")
    check_count("num_probes", num_probes, at_least=1)
    forms, lengths = [], []
    for V in probe_batches(op, num_probes, seed=seed, what="norm"):
        product = op @ V
        forms.append(column_dots(V, product))
        lengths.append(column_norms(product))
    trace_samples, norm_samples = gather_samples(forms), gather_samples(lengths)
    trace, trace_stderr = mean_and_stderr(trace_samples)
    around = positive_interval if op.psd and trace > 0 else mean_interval
    trace_low, trace_high = around(trace, trace_stderr, num_probes - 1)
    norm = mean_square(norm_samples)
    return OwnProbes(
        trace=float(trace),
        trace_stderr=float(trace_stderr),
        norm=float(norm.root),
        norm_stderr=float(norm.root_stderr),
        trace_samples=trace_samples,
        squared_samples=norm.samples,
        num_products=num_probes,
        seed=seed,
        trace_low=float(trace_low),
        trace_high=float(trace_high),
        norm_low=float(norm.low),
        norm_high=float(norm.high),
    )

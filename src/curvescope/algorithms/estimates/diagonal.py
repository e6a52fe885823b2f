"""The diagonal of an operator from random probes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.checks import check_count, check_square, of_one_matrix
from curvescope.algorithms.columns import probe_batches, summing_dtype, to_numpy
from curvescope.algorithms.estimates.intervals import mean_interval
from curvescope.algorithms.estimates.mean_square import safe_scale
from curvescope.algorithms.sums import parts
from curvescope.core.operator import LinearOperator
from curvescope.core.result import Result


@dataclass(frozen=True)
class DiagonalEstimate(Result):
    """Diagonal entries with their standard errors over probes (nan for one probe).

    Of a positive semi-definite operator no value is negative: a mean below zero is noise, and the value is 0.
    """

    values: np.ndarray  # (n,)
    stderr: np.ndarray  # (n,)
    num_products: int
    seed: int
    psd: bool = False

    @property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """Ends of 95 % intervals of the entries, (n,) each, see `intervals`; nan for one probe."""
        return mean_interval(self.values, self.stderr, self.num_products - 1, nonnegative=self.psd)


@of_one_matrix
def diagonal(op: LinearOperator, *, num_probes: int = 64, seed: int = 0) -> DiagonalEstimate:
    """Diagonal of a square operator, without bias: the mean of v ∘ (A v) over Rademacher probes v.

    The variance of entry i for one probe is the sum of squares of the other entries of row i (of
    the symmetric part), so a diagonal operator needs one probe (Bekas, Kokiopoulou and Saad 2007).

    Memory: two vectors in float64, which become the result, and, for the c columns that one product takes
    (at most 64 and at most 1 GiB), 2c vectors, the probes and what a product returns.
    """
    check_square(op, "diagonal")
    check_count("num_probes", num_probes, at_least=1)
    wide = summing_dtype(op.device)
    mean = torch.zeros(op.shape[0], dtype=wide, device=op.device)
    squares = torch.zeros_like(mean)  # sum of squared deviations from the mean
    seen, scale = 0, 1.0
    for V in probe_batches(op, num_probes, seed=seed, what="diagonal"):
        V.mul_(op @ V)
        scale = safe_scale(V) if seen == 0 else scale  # squares stay in range
        for part in parts(len(mean), mean.device, width=V.shape[1]):
            _add(mean[part], squares[part], V[part].to(wide).mul_(scale), seen)
        seen += V.shape[1]
    values = to_numpy(mean.div_(scale))
    if num_probes == 1:
        stderr = np.full(op.shape[0], np.nan)
    else:
        stderr = to_numpy(squares.div_(num_probes - 1).div_(num_probes).sqrt_().div_(scale))
    if op.psd:
        np.maximum(values, 0.0, out=values)
    return DiagonalEstimate(values, stderr, num_probes, seed, psd=op.psd)


def _add(mean: Tensor, squares: Tensor, samples: Tensor, seen: int) -> None:
    """Add columns of samples (n, c) to the mean and squared deviations of `seen` others, in place.

    Chan, Golub and LeVeque 1983.
    """
    count = samples.shape[1]
    own = samples.mean(dim=1)
    shift = own - mean
    squares += ((samples - own[:, None]) ** 2).sum(dim=1) + shift**2 * (seen * count / (seen + count))
    mean += shift * (count / (seen + count))

"""The diagonal of an operator from random probes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from curvescope.algorithms.checks import check_count, check_square
from curvescope.algorithms.columns import probe_batches, summing_dtype, to_numpy
from curvescope.core.operator import LinearOperator
from curvescope.core.result import Result


@dataclass(frozen=True)
class DiagonalEstimate(Result):
    """Diagonal entries with their standard errors over probes (nan for one probe)."""

    values: np.ndarray  # (n,)
    stderr: np.ndarray  # (n,)
    num_products: int
    seed: int


def diagonal(op: LinearOperator, *, num_probes: int = 64, seed: int = 0) -> DiagonalEstimate:
    """Diagonal of a square operator, without bias: the mean of v ∘ (A v) over Rademacher probes v.

    The variance of entry i for one probe is the sum of squares of the other entries of row i (of
    the symmetric part), so a diagonal operator needs one probe (Bekas, Kokiopoulou and Saad 2007).
    """
    check_square(op, "diagonal")
    check_count("num_probes", num_probes, at_least=1)
    wide = summing_dtype(op.device)
    mean = torch.zeros(op.shape[0], dtype=wide, device=op.device)
    squares = torch.zeros_like(mean)  # sum of squared deviations from the mean
    seen = 0
    for V in probe_batches(op, num_probes, seed=seed, what="diagonal"):
        samples = (V * (op @ V)).to(wide)
        count = samples.shape[1]
        batch_mean = samples.mean(dim=1)
        shift = batch_mean - mean
        # combine the batch with what came before (Chan, Golub and LeVeque 1983)
        squares += ((samples - batch_mean[:, None]) ** 2).sum(dim=1) + shift**2 * (
            seen * count / (seen + count)
        )
        mean += shift * (count / (seen + count))
        seen += count
    if num_probes == 1:
        stderr = np.full(op.shape[0], np.nan)
    else:
        stderr = to_numpy(torch.sqrt(squares / (num_probes - 1) / num_probes))
    return DiagonalEstimate(to_numpy(mean), stderr, num_probes, seed)

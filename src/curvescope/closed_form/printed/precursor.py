"""The bound of arXiv 2409.11995, the precursor of petrov2025, exactly as it is printed.

It is kept to be compared with: for ‖W‖ < 1 it is false, and it is a bound of the GGN only
(`bounds.relu_network` says why and has the corrected ones).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Literal

from torch import Tensor

from curvescope.closed_form.bounds.sums import spectral_norm
from curvescope.core.errors import UsageError

WeightNorm = Literal["spectral", "entries"]


def precursor_as_printed(x: Tensor, weights: Sequence[Tensor], *, norm: WeightNorm = "spectral") -> float:
    """‖H‖ ≤ n √2 M_x² M_W^{2n} + √2 M_W² (M_W^{2n} − 1)/(M_W² − 1) for n layers without biases.

    M_x = |x| and M_W is the largest norm of a weight ("spectral", the theorem), or the width h times the
    largest entry ("entries", the lemma that makes it grow as n (hM)^{2n}). The second summand has the form of
    a contribution of biases.
    """
    if norm not in ("spectral", "entries"):
        raise UsageError(f"expected norm 'spectral' or 'entries', got {norm!r}")
    if norm == "spectral":
        largest = max(float(spectral_norm(W.double())) for W in weights)
    else:
        largest = max(max(W.shape) for W in weights) * max(float(W.abs().max()) for W in weights)
    n, square, size = len(weights), largest**2, float(x.double().norm())
    geometric = sum(square**power for power in range(n))  # (M^{2n} − 1)/(M² − 1), at M = 1 too
    return sqrt(2) * (n * size**2 * square**n + square * geometric)

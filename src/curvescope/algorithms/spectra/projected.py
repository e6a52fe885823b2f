"""Traces from probes and a subspace whose products are known: exact inside it, sampled outside.

For orthonormal rows V (m, n) with A V known and T = V A Vᵀ, Q = Vᵀ and P = I − Q Qᵀ,

    A = P A P + (Q Qᵀ A + A Q Qᵀ − Q T Qᵀ),

the diagonal of the bracket is known, and that of P A P is the mean of x ∘ P A P x over probes x of signs,
with P A P x = P (A x − A Q (Qᵀ x)) from A x alone. What dominates the spectrum is inside, so the samples vary
far less than those of A (as in Hutch++, Meyer and others 2021); V must not depend on the probes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.columns import mean_and_stderr
from curvescope.algorithms.spectra.following import Subspace
from curvescope.algorithms.sums import norms, to_numpy


class Outside:
    """What probes say outside a subspace."""

    def __init__(self, subspace: Subspace):
        self.V, self.AV = subspace.V, subspace.AV
        self.T = torch.as_tensor(subspace.H[: subspace.count, : subspace.count]).to(self.V)

    def block_samples(self, X: Tensor, AX: Tensor, blocks: Sequence[slice]) -> tuple[np.ndarray, np.ndarray]:
        """Traces of diagonal blocks: what is known (B,), and samples (p, B) of the rest."""
        inside = 2 * (self.V * self.AV).sum(0) - (self.V * (self.T @ self.V)).sum(0)
        rest = AX - self.AV.T @ (self.V @ X)
        rest = X * (rest - self.V.T @ (self.V @ rest))
        exact = torch.stack([inside[rows].double().sum() for rows in blocks])
        samples = torch.stack([rest[rows].double().sum(0) for rows in blocks], dim=1)
        return to_numpy(exact), to_numpy(samples)


def ratio_and_stderr(part: Tensor, whole: Tensor) -> tuple[float, float]:
    """‖B‖_F / ‖A‖_F from B X and A X (n, p), and its standard error, to first order.

    The squares are means of ‖B x‖² and ‖A x‖²; their ratio varies as b − ρ a over the probes.
    """
    b, a = to_numpy(norms(part, dim=0)) ** 2, to_numpy(norms(whole, dim=0)) ** 2
    if not a.mean() > 0:
        return float("nan"), float("nan")
    square = b.mean() / a.mean()
    stderr = float(mean_and_stderr(b - square * a)[1]) / a.mean()
    return float(np.sqrt(square)), stderr / (2 * np.sqrt(square)) if square > 0 else 0.0

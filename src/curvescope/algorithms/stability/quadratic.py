"""Gradient descent on a quadratic, every step of it, from one Lanczos run.

On q(δ) = gᵀδ + ½ δᵀHδ, descent from δ₀ = 0 with learning rate η has gradients g_k = (I − ηH)^k g, so that

    ‖g_k‖² = Σᵢ wᵢ (1 − ηθᵢ)^{2k},        q(δ_k) = −Σᵢ wᵢ (1 − (1 − ηθᵢ)^{2k}) / (2θᵢ),

over all eigenvalues θᵢ, wᵢ the squared part of g along their eigenvectors. Both are polynomials in H between
two g, of degrees 2k and 2k − 1, and the Gauss quadrature of m Lanczos steps from g is exact up to degree
2m − 1: nodes and weights of k + 1 steps give k steps of descent, whatever the number of parameters and for
every learning rate at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from curvescope.algorithms.checks import check_count, check_symmetric
from curvescope.algorithms.spectra.krylov import lanczos
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import LinearOperator
from curvescope.core.result import Result

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class QuadraticDescent(Result):
    """What gradient descent does on a quadratic, for R learning rates and K steps."""

    learning_rates: np.ndarray  # (R,)
    change: np.ndarray  # (R, K + 1) q(δ_k), zero at first: what is added to the loss
    gradient_norm: np.ndarray  # (R, K + 1) ‖g_k‖
    nodes: np.ndarray  # (m,) Ritz values of H in the Krylov space of g
    weights: np.ndarray  # (m,) shares of ‖g‖² at them
    num_products: int

    def to_frame(self) -> pd.DataFrame:
        """One row per learning rate and step."""
        import pandas as pd

        R, K = self.change.shape
        return pd.DataFrame(
            {
                "learning_rate": np.repeat(self.learning_rates, K),
                "step": np.tile(np.arange(K), R),
                "change": self.change.ravel(),
                "gradient_norm": self.gradient_norm.ravel(),
            }
        )


def quadratic_descent(
    op: LinearOperator, gradient: Tensor, learning_rates: Sequence[float], num_steps: int
) -> QuadraticDescent:
    """Losses and gradient norms of gradient descent on gᵀδ + ½ δᵀHδ from δ = 0, exactly in exact arithmetic.

    It takes num_steps + 1 products, fewer where g lies in a smaller invariant subspace, and as many vectors
    in memory. A quadratic with negative curvature has no lowest point: its descent falls without end.

    Args:
        op: H, symmetric.
        gradient: g at the start, (n,).
        learning_rates: η, above 0.
        num_steps: K.
    """
    check_symmetric(op, "quadratic_descent")
    steps = check_count("num_steps", num_steps, at_least=1)
    rates = np.asarray(learning_rates, dtype=float)
    if rates.ndim != 1 or not len(rates) or not (np.isfinite(rates) & (rates > 0)).all():
        raise UsageError(f"expected learning rates above 0, got {learning_rates!r}")
    if gradient.shape != (op.shape[0],):
        raise ShapeError(f"expected a gradient of {op.shape[0]} entries, got {tuple(gradient.shape)}")
    found = lanczos(op, gradient[:, None], steps + 1)
    nodes, weights = (x[0, : found.lengths[0]] for x in found.quadrature())
    square = float(gradient.double() @ gradient.double())
    k = np.arange(steps + 1)[:, None]  # over steps, then nodes
    change, norms = [], []
    for rate in rates:
        power, x = np.abs(1 - rate * nodes) ** (2 * k), rate * nodes
        with np.errstate(divide="ignore", invalid="ignore"):
            logarithm = np.where(x < 0.5, np.log1p(-np.minimum(x, 0.5)), np.log(np.abs(1 - x)))
            fallen = -np.expm1(2 * k * logarithm) / (2 * nodes)
        fallen = np.where(nodes == 0, k * rate, np.where(k == 0, 0.0, fallen))
        change.append(-square * (fallen @ weights))
        norms.append(np.sqrt(square * (power @ weights)))
    return QuadraticDescent(
        learning_rates=rates,
        change=np.array(change),
        gradient_norm=np.array(norms),
        nodes=nodes,
        weights=weights,
        num_products=found.num_products,
    )

"""The surgeon's answer to removed weights where H is too large to be written out: by products alone."""

from __future__ import annotations

import torch
from torch import Tensor

from curvescope.algorithms.surgery.removal import Removal
from curvescope.algorithms.systems.solve import solve
from curvescope.core.errors import ShapeError
from curvescope.core.operator import LinearOperator

MAX_PRODUCTS = 50
TOL = 1e-2


def remove_by_products(
    w: Tensor,
    op: LinearOperator,
    removed: Tensor,
    *,
    damping: float,
    max_products: int = MAX_PRODUCTS,
    tol: float = TOL,
) -> tuple[Removal, float]:
    """As `removal.remove`, of H + λ I: (H + λ I)_RR δ_R = H_RQ w_Q by conjugate gradients, R what is left.

    Whatever its residual, the change takes w_Q to zero, and ½ δᵀ (H + λ I) δ is that of this change.

    Args:
        w: Weights (n,).
        op: H, positive semi-definite.
        removed: Q, positions (k,), each once.
        damping: λ, above 0 where H has no inverse.
        max_products: Of the conjugate gradients.
        tol: Relative residual at which they end.

    Returns:
        The change, and the relative residual.
    """
    if op.shape != (len(w), len(w)):
        raise ShapeError(f"expected an operator of {len(w)} rows and columns, got {op.shape}")
    delta, residual = torch.zeros_like(w), 0.0
    delta[removed] = -w[removed]
    left = torch.ones(len(w), dtype=torch.bool)
    left[removed] = False
    pull = -(op @ delta)[left.to(w.device)]
    if bool(left.any()) and bool((pull != 0).any()):
        found = solve(op.submatrix(left), pull, damping=damping, max_products=max_products, tol=tol)
        delta[left.to(w.device)] = found.x
        residual = float(found.residual)
    increase = float(delta @ (op @ delta) + damping * delta @ delta) / 2
    return Removal(delta, increase), residual

"""The eigenvalues that are smallest in absolute value: the largest of the inverse.

The search for extreme eigenpairs runs on A⁻¹, each of whose products is a system solved by minimal residuals.
A vector v with ‖A⁻¹ v − μ v‖ ≤ r has, after one more solve w = A⁻¹ v, a residual of at most λ² r on A with
λ = 1 / μ; so the vectors are polished by one solve each, and their residuals are measured with A itself.

Where a system cannot be solved, because A is singular up to rounding or its small eigenvalues are too many
and too close to zero, nothing is known of its inverse: what comes back are the best vectors of A², and that
they are not resolved.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.spectra.restart import Search
from curvescope.algorithms.spectra.ritz import Found, filled, rayleigh_ritz
from curvescope.algorithms.systems.solve import solve
from curvescope.algorithms.vectors import comfortable, orthonormalize
from curvescope.core.operator import LinearOperator

INNER = 0.1  # of the tolerance, for the systems
RESERVE = 5  # one part in so many of the products is kept for the case that systems cannot be solved
TIGHTEST = 50.0  # roundings: no system is solved to less


class _NotSolved(Exception):
    """A system with A was not solved to its tolerance."""


class _Inverting(LinearOperator):
    """A⁻¹ by minimal residuals; raises when a system is not solved within the products that are left."""

    symmetric = True

    def __init__(self, op: LinearOperator, tol: float, limit: int):
        self.op, self.tol, self.limit, self.products = op, tol, limit, 0
        self.shape, self.dtype, self.device, self.pieces = op.shape, op.dtype, op.device, op.pieces

    def _matmat(self, V: Tensor) -> Tensor:
        left = (self.limit - self.products) // V.shape[1]
        if left < 2:
            raise _NotSolved(f"{self.products} products were not enough")
        found = solve(self.op, V, method="minres", tol=self.tol, max_products=left)
        self.products += found.num_products
        if not found.converged:
            residual = float(np.max(found.residual))
            raise _NotSolved(f"a system was solved to {residual:.1g} only: {found.reason}")
        return found.x


def smallest(
    op: LinearOperator,
    *,
    k: int,
    tol: float,
    max_basis: int,
    limit: int,
    seed: int,
    starts: Tensor | None = None,
) -> Found:
    """The k eigenpairs of a symmetric operator with the least |λ|, ascending by it.

    Args:
        tol: residual on A that is aimed at, relative to the largest of the k values.
        limit: products with A.
    """
    eps = torch.finfo(op.dtype).eps
    options = {"k": k, "max_basis": max_basis, "seed": seed}
    inverting = _Inverting(op, max(INNER * tol, TIGHTEST * eps), limit - limit // RESERVE)
    try:
        found = _searched(inverting, tol=tol, starts=starts, **options)
    except _NotSolved as reason:
        return _of_the_square(op, inverting.products, limit, str(reason), tol=tol, **options)
    first, last = float(np.abs(found.values[0])), float(np.abs(found.values[-1]))
    if (found.residuals <= tol * last).all() or first == 0:
        return found
    # the tolerance of the search is relative to the smallest of them, ours to the largest
    tight = max(tol * first / last, TIGHTEST * eps)
    inverting.tol = max(INNER * tight, TIGHTEST * eps)
    try:
        return _searched(inverting, tol=tight, starts=found.Y.T, **options)
    except _NotSolved as reason:
        return found._replace(products=inverting.products, reason=str(reason))


def _searched(
    inverting: _Inverting, *, k: int, tol: float, max_basis: int, seed: int, starts: Tensor | None
) -> Found:
    """The search on the inverse, one solve more for each vector, and residuals on A."""
    search = Search(
        inverting,
        k=k,
        which="LM",
        tol=tol,
        max_basis=max_basis,
        max_products=inverting.limit,  # which solves use up first
        seed=seed,
        starts=starts,
    )
    search.run()
    W = inverting @ filled(search).T
    W = W * (comfortable(W) or 1.0)
    orthonormalize(W)
    found = _on(inverting.op, W.T.contiguous(), inverting.products, verified=search.verified)
    inverting.products = found.products
    return found


def _on(op: LinearOperator, Y: Tensor, products: int, *, verified: bool, reason: str = "") -> Found:
    """Ritz pairs of A on the rows of Y (k, n)."""
    values, residuals = rayleigh_ritz(op, Y, "SM", factor=comfortable(op @ Y[0]) or 1.0)
    return Found(values, Y, residuals, float(np.abs(values).max()), verified, products + len(Y) + 1, reason)


def _of_the_square(
    op: LinearOperator,
    used: int,
    limit: int,
    reason: str,
    *,
    k: int,
    tol: float,
    max_basis: int,
    seed: int,
) -> Found:
    """The vectors of the smallest eigenvalues of A² that the products left allow."""
    left = max((limit - used - k - 1) // 2, 1)
    search = Search(op @ op, k=k, which="SA", tol=tol, max_basis=max_basis, max_products=left, seed=seed)
    search.run()
    return _on(op, filled(search).clone(), used + 2 * search.products, verified=False, reason=reason)


def unresolved(values: np.ndarray, residuals: np.ndarray, reason: str) -> str:
    """Why the smallest eigenvalues are not known, in a sentence."""
    found = (
        f"not resolved: |λ| is at most {float(np.abs(values).max()):.2g}, with residuals of up to "
        f"{float(residuals.max()):.2g}"
    )
    if not reason and (residuals >= np.abs(values)).any():
        reason = "some cannot be told from zero"
    return f"{found}; {reason}" if reason else found

"""Optimal Brain Surgeon: remove weights from a quadratic loss, and update the others to compensate.

With ΔL(δ) = ½ δᵀ H δ, H positive definite, the best change that removes the weight q is

    δ = −(w_q / [H⁻¹]_qq) H⁻¹ e_q,    ΔL = w_q² / (2 [H⁻¹]_qq),

(Hassibi & Stork, 1993), with the factor w_q, which some slides omit in δ: without it w_q + δ_q = 0 holds only
for w_q = 1. For a set Q of weights removed together

    δ = −H⁻¹_{·Q} ([H⁻¹]_QQ)⁻¹ w_Q,    ΔL = ½ w_Qᵀ ([H⁻¹]_QQ)⁻¹ w_Q.

Removing them one after the other, with H⁻¹ downdated by e_q each time, ends at the same point: the minimum of
the quadratic with w_Q = 0. The order only decides which weights are in Q. Optimal Brain Damage (LeCun et al.,
1990) has a diagonal H, so that other weights do not compensate: ΔL = ½ Σ_Q H_qq w_q².

If the loss is not at its minimum, it also changes by gᵀδ. The choice of δ ignores this term, which would add
a training step; predictions include it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from curvescope.algorithms.systems.solve import solve
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import LinearOperator

UPDATE_INTERVAL = 64  # removals between two updates of the whole inverse


class Removal(NamedTuple):
    """A change of all weights that leaves some at zero."""

    delta: Tensor  # (n,)
    increase: float  # ½ δᵀ H δ


class Elimination(NamedTuple):
    """Weights in the order of their removal."""

    order: Tensor  # (k,) positions
    increases: Tensor  # (k,) of ½ δᵀ H δ, by each removal


def damped_inverse(H: Tensor, damping: float) -> tuple[Tensor, float]:
    """(H + λ I)⁻¹ with λ = damping · tr H / n, and λ.

    Args:
        H: Positive semi-definite (n, n).
        damping: Above 0 if H is singular; relative, so that one value fits blocks of all sizes.
    """
    _check_square(H)
    if not damping >= 0:
        raise UsageError(f"expected a damping of at least 0, got {damping!r}")
    shift = damping * float(H.diagonal().mean())
    system = H + shift * torch.eye(len(H), dtype=H.dtype, device=H.device)
    factor, info = torch.linalg.cholesky_ex(system)
    if int(info):
        raise UsageError(
            f"expected a positive definite matrix, got one that is not with a damping of {damping:g} of its "
            "mean diagonal",
            hint="use a larger damping, or the GGN instead of the Hessian",
        )
    return torch.cholesky_inverse(factor), shift


def diagonal_saliencies(w: Tensor, diagonal: Tensor) -> Tensor:
    """½ H_qq w_q² for every weight (n,): the loss increase of its removal if the others stay fixed (OBD)."""
    return diagonal * w.square() / 2


def saliencies(w: Tensor, inverse_diagonal: Tensor) -> Tensor:
    """w_q² / (2 [H⁻¹]_qq) for every weight (n,): loss increase of its removal with compensation."""
    return w.square() / (2 * inverse_diagonal)


def remove(w: Tensor, inverse: Tensor, removed: Tensor) -> Removal:
    """Change of smallest ½ δᵀ H δ that sets the weights at the positions `removed` (k,) to zero.

    Args:
        w: Weights (n,).
        inverse: H⁻¹ (n, n).
        removed: Positions Q, each once.
    """
    _check_square(inverse, len(w))
    if not len(removed):
        return Removal(torch.zeros_like(w), 0.0)
    columns = inverse[:, removed]
    multipliers = torch.cholesky_solve(
        w[removed, None], torch.linalg.cholesky(columns[removed, :]), upper=False
    )[:, 0]
    delta = -(columns @ multipliers)
    delta[removed] = -w[removed]  # exactly zero
    return Removal(delta, float(w[removed] @ multipliers) / 2)


def eliminate(w: Tensor, inverse: Tensor, count: int) -> Elimination:
    """Remove the weights of least saliency one after the other; after each, the others compensate.

    After q, the inverse on the remaining weights is H⁻¹ − H⁻¹ e_q e_qᵀ H⁻¹ / [H⁻¹]_qq. The order is greedy,
    and H is the same throughout. Time: O(k n²), in products of matrices for all but n k of it; memory n².

    Args:
        w: Weights (n,).
        inverse: H⁻¹ (n, n).
        count: k, at most n.
    """
    _check_square(inverse, len(w))
    if not 0 <= count <= len(w):
        raise UsageError(f"expected a count from 0 to {len(w)}, got {count}")
    inverse, w, diagonal = inverse.clone(), w.clone(), inverse.diagonal().clone()
    is_left = torch.ones(len(w), dtype=torch.bool, device=w.device)
    order, increases = [], []
    for start in range(0, count, UPDATE_INTERVAL):
        factors = inverse.new_zeros(
            len(w), min(UPDATE_INTERVAL, count - start)
        )  # factors of the downdate of the inverse
        for j in range(factors.shape[1]):
            cost = torch.where(is_left, saliencies(w, diagonal), torch.inf)
            q = int(cost.argmin())
            column = inverse[:, q] - factors[:, :j] @ factors[q, :j]
            order.append(q)
            increases.append(cost[q])
            w -= w[q] / column[q] * column
            factors[:, j] = column / column[q].sqrt()
            is_left[q] = False
            w = torch.where(is_left, w, 0)
            diagonal = torch.where(is_left, diagonal - factors[:, j].square(), 1)
        inverse -= factors @ factors.T
    empty = w.new_zeros(0)
    return Elimination(torch.tensor(order, dtype=torch.int64), torch.stack(increases) if increases else empty)


def _check_square(H: Tensor, n: int | None = None) -> None:
    n = H.shape[0] if n is None and H.dim() == 2 else n
    if H.dim() != 2 or H.shape != (n, n):
        raise ShapeError(f"expected a matrix of {n} rows and columns, got {tuple(H.shape)}")


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
    """Solve `removal.remove` for H + λ I by conjugate gradients: (H + λ I)_RR δ_R = H_RQ w_Q, R the kept
    entries.

    For any residual, the change sets w_Q to zero, and ½ δᵀ (H + λ I) δ belongs to this change.

    Args:
        w: Weights (n,).
        op: H, positive semi-definite.
        removed: Q, positions (k,), each once.
        damping: λ, above 0 where H has no inverse.
        max_products: Largest number of products of the conjugate gradients.
        tol: Relative residual at which they stop.

    Returns:
        The change, and the relative residual.
    """
    if op.shape != (len(w), len(w)):
        raise ShapeError(f"expected an operator of {len(w)} rows and columns, got {op.shape}")
    delta, residual = torch.zeros_like(w), 0.0
    delta[removed] = -w[removed]
    is_kept = torch.ones(len(w), dtype=torch.bool)
    is_kept[removed] = False
    pull = -(op @ delta)[is_kept.to(w.device)]
    if bool(is_kept.any()) and bool((pull != 0).any()):
        solution = solve(op.submatrix(is_kept), pull, damping=damping, max_products=max_products, tol=tol)
        delta[is_kept.to(w.device)] = solution.x
        residual = float(solution.residual)
    increase = float(delta @ (op @ delta) + damping * delta @ delta) / 2
    return Removal(delta, increase), residual

"""The Lanczos recurrence on several columns at once, each with its own Krylov space.

For a symmetric A and a unit vector q₁, A Q = Q T + β q eᵀ with orthonormal Q and tridiagonal T. The
eigenvalues θᵢ of T and the squared first entries τᵢ of its eigenvectors are the nodes and weights of the
Gauss quadrature of the measure q₁ᵀ δ(A − λ) q₁: Σ τᵢ p(θᵢ) = q₁ᵀ p(A) q₁ for polynomials p of degree
below twice the number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.checks import check_count, check_symmetric
from curvescope.algorithms.columns import norms, summing_dtype, to_numpy
from curvescope.core.errors import CurvescopeError, ShapeError
from curvescope.core.operator import LinearOperator, check_vector
from curvescope.core.progress import track
from curvescope.core.result import Result

BREAKDOWN = 10.0  # roundings: a β below this many, relative to the column's largest entry of T, is zero


@dataclass(frozen=True)
class Tridiagonals(Result):
    """One tridiagonal matrix for each start column; column j has `lengths[j]` valid steps, then zeros."""

    alpha: np.ndarray  # (k, S) diagonals
    beta: np.ndarray  # (k, S) below the diagonal; the last valid one couples to the vector not used
    lengths: np.ndarray  # (k,) steps until the Krylov space was exhausted, or S
    num_products: int  # products with one vector

    def quadrature(self) -> tuple[np.ndarray, np.ndarray]:
        """Nodes and weights, (k, S) each, nodes ascending; past the length the weight is zero."""
        nodes, weights = np.zeros_like(self.alpha), np.zeros_like(self.alpha)
        for j, length in enumerate(self.lengths):
            off = np.diag(self.beta[j, : length - 1], -1)
            values, vectors = np.linalg.eigh(np.diag(self.alpha[j, :length]) + off + off.T)
            nodes[j, :length], weights[j, :length] = values, vectors[0] ** 2
            nodes[j, length:] = values[-1]  # so that padding does not widen the range
        return nodes, weights


class Recurrence:
    """State of the Lanczos recurrence for columns (n, k), advanced by one batched product at a time.

    Columns never meet: each is orthogonalised against its own basis, twice when `reorthogonalize`, else
    only against its two predecessors. A column whose space is exhausted becomes zero and stays so;
    nothing is read back from the device before `finish`.
    """

    def __init__(self, start: Tensor, num_steps: int, *, reorthogonalize: bool = True):
        n, k = start.shape
        self.reorthogonalize, self.count = reorthogonalize, 0
        # rows[c, s] is basis vector s of column c; without reorthogonalisation only the last two are kept
        depth = num_steps + 1 if reorthogonalize else 2
        self.rows = torch.zeros(k, depth, n, dtype=start.dtype, device=start.device)
        self.rows[:, 0] = (start / norms(start, dim=0)).T
        self.alpha = torch.zeros(k, num_steps, dtype=start.dtype, device=start.device)
        self.beta = torch.zeros_like(self.alpha)
        self.alive = torch.ones(k, num_steps + 1, dtype=torch.bool, device=start.device)
        self.scale = torch.zeros(k, dtype=start.dtype, device=start.device)

    @property
    def vectors(self) -> Tensor:
        """The columns (n, k) that the next product is taken with."""
        return self.rows[:, self._slot(self.count)].T

    def _slot(self, step: int) -> int:
        return step if self.reorthogonalize else step % 2

    def advance(self, product: Tensor) -> None:
        """Take one step, given A @ vectors."""
        j, q = self.count, self.rows[:, self._slot(self.count)]
        w = product.T
        alpha = (w * q).sum(dim=1, dtype=summing_dtype(w.device)).to(w.dtype)
        w = self._orthogonalised(w, alpha)
        beta = norms(w, dim=1)
        self.scale = torch.maximum(self.scale, torch.maximum(alpha.abs(), beta))
        rounding = BREAKDOWN * torch.finfo(w.dtype).eps
        # not (β ≤ …) so that a nan stays alive and is reported by finish
        alive = self.alive[:, j] & ~(beta <= rounding * self.scale)
        self.alpha[:, j] = alpha
        self.beta[:, j] = torch.where(alive, beta, 0)
        self.alive[:, j + 1] = alive
        self.rows[:, self._slot(j + 1)] = torch.where(
            alive[:, None], w / torch.where(alive, beta, 1)[:, None], 0
        )
        self.count += 1

    def _orthogonalised(self, w: Tensor, alpha: Tensor) -> Tensor:
        j = self.count
        if not self.reorthogonalize:
            w = w - alpha[:, None] * self.rows[:, j % 2]
            return w if j == 0 else w - self.beta[:, j - 1, None] * self.rows[:, (j - 1) % 2]
        # column by column: faster than batched products, and independent of which columns run together
        return torch.stack([_twice(basis[: j + 1], x) for basis, x in zip(self.rows, w, strict=True)])

    def finish(self) -> Tridiagonals:
        """The tridiagonal matrices of the steps taken so far."""
        alpha, beta = to_numpy(self.alpha[:, : self.count]), to_numpy(self.beta[:, : self.count])
        if not (np.isfinite(alpha).all() and np.isfinite(beta).all()):
            raise CurvescopeError(
                "a product of the operator is not finite", hint="look for nan or inf in op @ v"
            )
        lengths = self.alive[:, : self.count].sum(dim=1).cpu().numpy()
        return Tridiagonals(alpha, beta, lengths, alpha.shape[0] * self.count)


def _twice(basis: Tensor, x: Tensor) -> Tensor:
    """x (n,) made orthogonal to the rows of a basis (s, n), twice, which is enough for full precision."""
    for _ in range(2):
        x = torch.addmv(x, basis.T, basis @ x, alpha=-1)
    return x


def lanczos(
    op: LinearOperator, start_columns: Tensor, num_steps: int, *, reorthogonalize: bool = True
) -> Tridiagonals:
    """Run the Lanczos recurrence from each of the columns (n, k), in lock step.

    Every step is one product with k columns. With `reorthogonalize` the bases are kept, k (num_steps + 1)
    vectors; without, two vectors for each column, at the price of repeated copies of converged
    eigenvalues (whose weights still add up).
    """
    check_symmetric(op, "lanczos")
    check_vector(op, start_columns)
    if start_columns.dim() != 2 or start_columns.shape[1] == 0:
        raise ShapeError(f"expected start columns ({op.shape[0]}, k), got {tuple(start_columns.shape)}")
    if not bool((start_columns != 0).any(dim=0).all()):
        raise ShapeError("expected start columns that are not zero, got a zero column")
    steps = min(check_count("num_steps", num_steps, at_least=1), op.shape[0])
    recurrence = Recurrence(start_columns, steps, reorthogonalize=reorthogonalize)
    for _ in track(range(steps), "Lanczos"):
        recurrence.advance(op @ recurrence.vectors)
    return recurrence.finish()

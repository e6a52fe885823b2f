"""The Lanczos recurrence on several columns at once, each with its own Krylov space.

For a symmetric A and a unit vector q₁, A Q = Q T + β q eᵀ with orthonormal Q and tridiagonal T. The
eigenvalues θᵢ of T and the squared first entries τᵢ of its eigenvectors are the nodes and weights of the
Gauss quadrature of the measure q₁ᵀ δ(A − λ) q₁: Σ τᵢ p(θᵢ) = q₁ᵀ p(A) q₁ for polynomials p of degree
below twice the number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.accurate_sums import inner, norms
from curvescope.algorithms.checks import check_choice, check_count, check_symmetric, fixed_operator
from curvescope.algorithms.krylov_storage import (
    MIN_ON_DEVICE,
    BasisPlacement,
    HostRows,
    SplitBasis,
    Where,
    place_basis,
)
from curvescope.algorithms.vectors import (
    MAX_OVERLAP,
    MAX_OVERLAP_LOOSE,
    check_finite,
    fresh,
    none_is_zero,
    orthogonalize,
    safe_vector_scale,
    three_terms,
)
from curvescope.core.errors import ShapeError
from curvescope.core.operator import LinearOperator, as_columns
from curvescope.core.progress import track
from curvescope.core.result import Result

BREAKDOWN = 10.0  # roundings: a β below this many, relative to what was subtracted, is zero


@dataclass(frozen=True)
class Tridiagonals(Result):
    """One tridiagonal matrix for each start column; column j has `lengths[j]` valid steps, then zeros."""

    alpha: np.ndarray  # (k, S) diagonals
    beta: np.ndarray  # (k, S) below the diagonal; the last valid one couples to the vector not used
    lengths: np.ndarray  # (k,) steps until the Krylov space was exhausted, or S
    num_products: int  # products with one vector
    orthogonality: float = float("nan")  # largest |qᵢ · qⱼ|, i ≠ j, as measured; nan if it was not measured

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

    Start columns are written to `vectors` before `begin`. Columns are independent: each is orthogonalized
    against its own basis with `reorthogonalize`, else only against its two predecessors. A column whose space
    is exhausted becomes zero and stays so.

    Memory: k (num_steps + 1) vectors, or 2k without reorthogonalization. If `near` is given, that many of
        each column (at least three) are on the device, and the others in host memory (`krylov_storage`).
    """

    def __init__(
        self,
        op: LinearOperator,
        n: int,
        k: int,
        num_steps: int,
        *,
        reorthogonalize: bool = True,
        near: int | None = None,
    ):
        self.reorthogonalize, self.count, self.num_steps = reorthogonalize, 0, num_steps
        # rows[c, s] is basis vector s of column c; without reorthogonalization only the last two are kept
        depth = num_steps + 1 if reorthogonalize else 2
        self.depth = depth if near is None else min(depth, max(near, MIN_ON_DEVICE))
        self.rows = fresh(op, k, self.depth, n)
        options = {"most": depth - self.depth, "dtype": op.dtype, "device": op.device}
        self.far = [HostRows(n, **options) for _ in range(k if self.depth < depth else 0)]
        self.alpha, self.beta = np.zeros((k, num_steps)), np.zeros((k, num_steps))
        self.lengths = np.zeros(k, dtype=int)
        self.alive = np.ones(k, dtype=bool)
        self.overlap = [np.zeros(0)] * k  # overlap of the last vector of each column with earlier ones
        self.orthogonality = 0.0 if reorthogonalize else float("nan")  # largest overlap so far
        self.num_passes = 0  # number of passes over a basis
        self._squared_asymmetry = np.zeros(k)  # squared asymmetry of Qᵀ A Q
        self.factor = 0.0  # scale of products, set after the first one

    @property
    def vectors(self) -> Tensor:
        """Columns (n, k) for the next product."""
        return self.rows[:, self._slot(self.count)].T

    def begin(self) -> None:
        """Normalize the start columns."""
        for row, length in zip(self.rows[:, 0], norms(self.vectors, dim=0), strict=True):
            row.div_(length)

    def _slot(self, step: int) -> int:
        """Return the index of a step's vector, the last or the next one."""
        if not self.reorthogonalize:
            return step % 2
        return min(step, self.depth - (2 if step == self.count else 1)) if self.far else step

    def _move_to_host(self) -> None:
        """Move the third-last vector to host memory, and shift the last two."""
        for rows, far in zip(self.rows, self.far, strict=True):
            far.append(rows[-3])
            rows[-3] = rows[-2]
            rows[-2] = rows[-1]

    def _basis(self, c: int) -> Tensor | SplitBasis:
        """Return the vectors against which the next one of a column is orthogonalized."""
        if self.far and len(self.far[c]):
            return SplitBasis(self.rows[c, :-1], self.far[c])
        return self.rows[c, : self.count + 1]

    def advance(self, product: Tensor) -> None:
        """Take one step, given A @ vectors."""
        for c in range(len(self.rows)):
            if self.alive[c]:
                self._advance_column(c, product[:, c])
            else:
                self.rows[c, self._slot(self.count + 1)].zero_()
        self.count += 1
        if self.depth <= self.count + 1 and self.count < self.num_steps and self.far:
            self._move_to_host()

    def _advance_column(self, c: int, product: Tensor) -> None:
        j, basis = self.count, self.rows[c]
        q, w = basis[self._slot(j)], basis[self._slot(j + 1)]
        before = float(self.beta[c, j - 1]) if j else 0.0
        if self.factor == 0.0:
            self.factor = safe_vector_scale(product)
        if self.factor not in (0.0, 1.0):
            product = product * self.factor
        if self.reorthogonalize:
            alpha = float(inner(q, product))
            expected = self._expected(c, alpha)
            semi = MAX_OVERLAP_LOOSE if w.is_cuda else MAX_OVERLAP
            remainder = orthogonalize(self._basis(c), product, out=w, expected=expected, tol=1.0, semi=semi)
            beta, self.overlap[c] = remainder.norm, remainder.overlap / (remainder.norm or 1.0)
            if beta:
                self.orthogonality = max(self.orthogonality, float(np.abs(self.overlap[c]).max()))
            self.num_passes += remainder.passes
            self._squared_asymmetry[c] += float(
                np.square(remainder.coefficients + remainder.overlap - expected).sum()
            )
        else:
            alpha, beta = three_terms(product, q, w, before)
            beta *= beta > BREAKDOWN * torch.finfo(w.dtype).eps * (abs(alpha) + before)
        check_finite(alpha, beta)
        self.alpha[c, j], self.beta[c, j], self.lengths[c] = alpha, beta, j + 1
        self.alive[c] = beta > 0
        w.div_(beta) if beta else w.zero_()

    def _expected(self, c: int, alpha: float) -> np.ndarray:
        """Qᵀ A q for the last vector q of basis Q, which is orthogonal to the others up to `overlap`.

        It is T (Qᵀ q) up to the last entry, qᵀ A q = α.
        """
        j, g = self.count, np.append(self.overlap[c], 1.0)
        found = self.alpha[c, : j + 1] * g
        found[1:] += self.beta[c, :j] * g[:-1]
        found[:-1] += self.beta[c, :j] * g[1:]
        found[-1] = alpha
        return found

    @property
    def asymmetry(self) -> np.ndarray:
        """‖K − Kᵀ‖_F / 2 of K = Qᵀ A Q for each column (k,), as measured: rounding, if A is symmetric."""
        return np.sqrt(self._squared_asymmetry / 2) / (self.factor or 1.0)

    def finish(self) -> Tridiagonals:
        """Return the tridiagonal matrices of the steps so far."""
        size = self.factor or 1.0
        alpha, beta = self.alpha[:, : self.count] / size, self.beta[:, : self.count] / size
        products = alpha.shape[0] * self.count
        return Tridiagonals(alpha, beta, self.lengths.copy(), products, self.orthogonality)


@fixed_operator
def lanczos(
    op: LinearOperator,
    start_columns: Tensor | np.ndarray,
    num_steps: int,
    *,
    reorthogonalize: bool = True,
    basis: Where = "auto",
) -> Tridiagonals:
    """Run the Lanczos recurrence from each of the columns (n, k), in lock step.

    Every step is one product with k columns. With `reorthogonalize` the bases are stored, k (num_steps + 1)
    vectors. Without it, two vectors per column suffice, but converged eigenvalues may have several copies
    (whose weights still add up).

    Args:
        basis: Storage of the bases: "device"; "host", with only three vectors of each on the device; "auto",
            in host memory as much as exceeds half of a GPU's free memory, or 8 GiB. See `krylov_storage`.
    """
    check_symmetric(op, "lanczos")
    start = as_columns(op, start_columns)
    if start_columns.ndim != 2 or start.shape[1] == 0:
        raise ShapeError(f"expected start columns ({op.shape[0]}, k), got {tuple(start_columns.shape)}")
    if not none_is_zero(start):
        raise ShapeError("expected start columns that are not zero, got a zero column")
    steps = min(check_count("num_steps", num_steps, at_least=1), op.shape[0])
    check_choice("basis", basis, get_args(Where))
    place = BasisPlacement(None, 0)
    if reorthogonalize and (basis == "host" or (basis == "auto" and op.device.type == "cuda")):
        what = {"columns": start.shape[1], "what": f"{start.shape[1]} columns"}
        place = place_basis(op, len(start), steps + 1, where=basis, max_gib=None, **what)
    options = {"reorthogonalize": reorthogonalize, "near": place.near}
    recurrence = Recurrence(op, len(start), start.shape[1], steps, **options)
    recurrence.vectors.copy_(start)
    recurrence.begin()
    for _ in track(range(steps), "Lanczos"):
        recurrence.advance(op @ recurrence.vectors)
    return recurrence.finish()

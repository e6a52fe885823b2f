"""Both ends of the spectrum of an operator that changes little by little, from the vectors found before.

A subspace V with its products A V is begun with the eigenvectors of the last time, a few vectors that the
caller has a reason to look at, and one random vector; Rayleigh–Ritz on it gives Ritz pairs (θ, u), and while
one that is wanted has a residual r = A u − θ u above its tolerance, r is added. Begun with one vector alone
this is Lanczos: all residuals are multiples of its next vector.

A symmetric operator has an eigenvalue within ‖r‖ of θ, and θ_max ≤ λ_max, θ_min ≥ λ_min. That nothing lies
beyond them is not proved, as `eigsh` does it with a sweep from a random vector that takes as many products as
a search from nothing; here a random vector is part of every subspace.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.columns import columns_at_once
from curvescope.algorithms.sums import gram, norms, to_numpy
from curvescope.algorithms.vectors import check_finite, fresh, orthogonalize, random_vector, rotate
from curvescope.core.operator import LinearOperator

LOST = 1e-6  # of a vector's length: less than this outside the subspace is rounding
FLOOR = 0.02  # of the largest |Ritz value|: an end that is smaller is measured by this
LOOSE = 0.02  # of the largest |Ritz value|: residual of wanted vectors that are no end


class Ends(NamedTuple):
    """The largest eigenvalues, descending, then the smallest where it is wanted; with their residuals."""

    values: np.ndarray  # (k,)
    residuals: np.ndarray  # (k,)
    errors: np.ndarray  # (k,) min(r, r²/gap) of the ends; the residual r of those between
    vectors: Tensor  # (k, n) orthonormal rows
    angle: float  # sine of that between the largest ones' span and the true one, at most: see `_angle`
    forms: np.ndarray  # xᵀ A x / xᵀ x of the start vectors, in their order
    converged: bool  # both ends have errors within the tolerance
    num_products: int
    subspace: Subspace


class Subspace:
    """Orthonormal rows V (m, n) with the products A V and the projection V A Vᵀ.

    Memory: twice `room` vectors.
    """

    def __init__(self, op: LinearOperator, room: int):
        self.op, self.room = op, min(room, op.shape[0])
        self._V, self._AV = fresh(op, self.room, op.shape[0]), fresh(op, self.room, op.shape[0])
        self.H = np.zeros((self.room, self.room))
        self.count, self.products = 0, 0

    @property
    def V(self) -> Tensor:
        """(m, n)."""
        return self._V[: self.count]

    @property
    def AV(self) -> Tensor:
        """(m, n)."""
        return self._AV[: self.count]

    def add(self, rows: Tensor) -> int:
        """Extend by what lies outside, (k, n): how many directions that were, one product each."""
        first = self.count
        for row in rows[: self.room - first]:
            self._append(row)
        new = slice(first, self.count)
        width = columns_at_once(self.op)
        for start in range(first, self.count, width):
            some = slice(start, min(start + width, self.count))
            self._AV[some] = (self.op @ self._V[some].T).T
        self.products += self.count - first
        if self.count > first:
            block = gram(self.V, self._AV[new])
            check_finite(block)
            self.H[: self.count, new] = block
            self.H[new, : self.count] = block.T
        return self.count - first

    def _append(self, row: Tensor) -> None:
        w = self._V[self.count]
        length = float(norms(row))
        if not length > 0:
            return
        torch.div(row, length, out=w)
        rest = orthogonalize(self.V, w).norm
        if rest > LOST:
            w /= rest
            orthogonalize(self.V, w)
            self.count += 1

    def ritz(self) -> tuple[np.ndarray, np.ndarray]:
        """Ritz values ascending, and their vectors in coordinates of V, as columns."""
        H = self.H[: self.count, : self.count]
        return np.linalg.eigh((H + H.T) / 2)

    def rows(self, S: np.ndarray) -> Tensor:
        """Sᵀ V for columns S (m, k): (k, n)."""
        return _numbers(S, self.V) @ self.V

    def residuals(self, theta: np.ndarray, S: np.ndarray) -> Tensor:
        """A u − θ u for Ritz pairs: (k, n)."""
        return _numbers(S, self.V) @ self.AV - _numbers(S * theta, self.V) @ self.V

    def forms(self, rows: Tensor) -> np.ndarray:
        """xᵀ A x / xᵀ x of rows (k, n) that lie inside: (k,)."""
        C = gram(rows, self.V)
        H = self.H[: self.count, : self.count]
        return ((C @ H) * C).sum(axis=1) / np.maximum((C * C).sum(axis=1), 1e-300)

    def keep(self, theta: np.ndarray, S: np.ndarray) -> None:
        """Let go of all but these Ritz pairs."""
        rotate(self.V, S)
        rotate(self.AV, S)
        self.count = len(theta)
        self.H[:] = 0
        self.H[range(self.count), range(self.count)] = theta


def follow_ends(
    op: LinearOperator,
    starts: Tensor | None = None,
    *,
    top: int = 1,
    bottom: bool = True,
    tol: float = 0.01,
    max_products: int = 200,
    max_basis: int = 48,
    seed: int = 0,
) -> Ends:
    """The `top` largest eigenpairs and the smallest one, as far as the tolerance asks for.

    Args:
        starts: rows (m, n) to begin with: eigenvectors of the last time.
        bottom: whether the smallest is wanted.
        tol: error of the two ends that is enough, relative to the largest |Ritz value|.
        max_products: most products with one vector.
        max_basis: vectors in the subspace, each kept with its product.
        seed: of the random vector.
    """
    n = op.shape[0]
    begin = fresh(op, 1, n)
    random_vector(op, seed=seed, index=0, out=begin[0])
    given = begin[:0] if starts is None else starts.to(begin)
    space = Subspace(op, max(max_basis, top + 4, len(given) + 4))
    space.add(torch.cat([given, begin]))
    forms = space.forms(given)
    while True:
        found = _Pairs(space, min(top, n), bottom=bottom)
        limits = found.limits(tol)
        enough = space.count >= min(top + 2, n) and bool((found.errors <= limits).all())
        if enough or space.products >= max_products or space.count == n:
            break
        if space.count == space.room:
            space.keep(*_best(*space.ritz(), space.room, top))
        if not space.add(found.next(limits)):
            break
    return Ends(
        values=found.values,
        residuals=found.sizes,
        errors=found.errors,
        vectors=space.rows(found.S),
        angle=_angle(found.sizes[: min(top, n)], space.ritz()[0]),
        forms=forms,
        converged=bool((found.errors <= limits)[found.is_end].all()),
        num_products=space.products,
        subspace=space,
    )


class _Pairs:
    """The wanted Ritz pairs of a subspace: the largest first, then the smallest one."""

    def __init__(self, space: Subspace, top: int, *, bottom: bool):
        theta, S = space.ritz()
        m = len(theta)
        high = list(range(m - 1, max(m - 1 - top, -1), -1))
        wanted = np.array([*high, 0] if bottom and 0 not in high else high)
        beside = np.array(
            [i for i in (m - 1 - len(high), 1) if 0 <= i < m], dtype=int
        )  # what the ends stand apart from
        self.values, self.S, self.scale = theta[wanted], S[:, wanted], float(np.abs(theta).max())
        self.rows = space.residuals(self.values, self.S)
        self.sizes = to_numpy(norms(self.rows, dim=1))
        self.is_end = (wanted == m - 1) | (bottom & (wanted == 0))
        reach = {int(i): float(r) for i, r in zip(wanted, self.sizes, strict=True)}
        for i, r in zip(beside, norms(space.residuals(theta[beside], S[:, beside]), dim=1), strict=True):
            reach[int(i)] = float(r)
        self.errors = self.sizes.copy()
        for place in np.flatnonzero(self.is_end):
            i = int(wanted[place])
            j = i - 1 if i == m - 1 else i + 1
            gap = abs(theta[i] - theta[j]) - reach[j] if 0 <= j < m else 0.0
            if gap > 0:
                self.errors[place] = min(self.sizes[place], self.sizes[place] ** 2 / gap)

    def limits(self, tol: float) -> np.ndarray:
        """Errors that are enough, (k,): an end is measured by itself, for in many dimensions a random vector
        has a Ritz value near zero with a residual that is small beside the other end."""
        own = np.maximum(np.abs(self.values), FLOOR * self.scale)
        first = np.arange(len(own)) == 0
        return np.where(self.is_end, np.where(first, tol, 10 * tol) * own, LOOSE * self.scale)

    def next(self, limits: np.ndarray) -> Tensor:
        """The residual that is worst, relative to what is allowed."""
        worst = int((self.errors / np.maximum(limits, 1e-300)).argmax())
        return self.rows[worst : worst + 1]


def _angle(residuals: np.ndarray, theta: np.ndarray) -> float:
    """‖R‖_F / gap for the k largest of ascending Ritz values, at most 1: the sin Θ theorem (Davis, Kahan).

    The gap is that between the last of them and the next, taken from Ritz values.
    """
    k = len(residuals)
    if k >= len(theta):
        return 0.0
    size, gap = float(np.linalg.norm(residuals)), float(theta[-k] - theta[-k - 1])
    return min(size / gap, 1.0) if gap > 0 else 1.0


def _best(theta: np.ndarray, S: np.ndarray, room: int, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Half of the room: mostly from the high end."""
    low = max(room // 8, 1)
    high = max(room // 2 - low, top + 1)
    chosen = np.r_[0:low, len(theta) - high : len(theta)]
    return theta[chosen], S[:, chosen]


def _numbers(S: np.ndarray, like: Tensor) -> Tensor:
    return torch.as_tensor(np.ascontiguousarray(S.T)).to(like)

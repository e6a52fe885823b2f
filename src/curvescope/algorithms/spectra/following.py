"""Both ends of the spectrum of an operator that changes little by little, from the vectors found before.

A subspace V with its products A V is begun with one vector, the sum of the eigenvectors of the last time and
of a random one, and with vectors that the caller has a reason to look at; Rayleigh–Ritz on it gives Ritz
pairs (θ, u), and while one that is wanted has a residual r = A u − θ u above its tolerance, r is added. Begun
with one vector alone this is Lanczos: all residuals are multiples of its next vector, and k eigenvectors that
are in the sum take about k products to come apart.

A symmetric operator has an eigenvalue within ‖r‖ of θ, and θ_max ≤ λ_max, θ_min ≥ λ_min. That nothing lies
beyond them is not proved, as `eigsh` does it with a sweep from a random vector that takes as many products as
a search from nothing; here a random vector is part of every start.

Traces from probes and a subspace whose products are known: exact inside it, sampled outside.

For orthonormal rows V (m, n) with A V known and T = V A Vᵀ, Q = Vᵀ and P = I − Q Qᵀ,

    A = P A P + (Q Qᵀ A + A Q Qᵀ − Q T Qᵀ),

the diagonal of the bracket is known, and that of P A P is the mean of x ∘ P A P x over probes x of signs,
with P A P x = P (A x − A Q (Qᵀ x)) from A x alone. What dominates the spectrum is inside, so the samples vary
far less than those of A (as in Hutch++, Meyer and others 2021); V must not depend on the probes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.checks import of_one_matrix
from curvescope.algorithms.columns import columns_at_once, mean_and_stderr
from curvescope.algorithms.sums import gram, norms, to_numpy
from curvescope.algorithms.vectors import check_finite, fresh, orthogonalize, random_vector, rotate
from curvescope.core.operator import LinearOperator

LOST = 1e-6  # of a vector's length: less than this outside the subspace is rounding
FLOOR = 0.05  # of the largest |Ritz value|: a largest value that is smaller is measured by this
RANDOM = 0.5  # length of the random vector beside that of what is followed
LEAST = 6  # vectors in a subspace that is enough for one end, and three more for both
STEADY = 3  # products over which the ends must have come to rest


class Ends(NamedTuple):
    """The largest eigenvalues, descending, then the smallest where it is wanted; with their residuals."""

    values: np.ndarray  # (k,)
    residuals: np.ndarray  # (k,)
    errors: np.ndarray  # (k,) see `_Pairs`; the residual of those between
    vectors: Tensor  # (k, n) orthonormal rows
    angle: float  # sine of that between the largest ones' span and the true one, at most: see `_angle`
    forms: np.ndarray  # xᵀ A x / xᵀ x of the vectors beside
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

    def lowest(self, count: int) -> Tensor:
        """The Ritz vectors of the smallest Ritz values: (k, n)."""
        return self.rows(self.ritz()[1][:, :count])

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


@of_one_matrix
def follow_ends(
    op: LinearOperator,
    followed: Tensor | None = None,
    beside: Tensor | None = None,
    *,
    top: int = 1,
    bottom: bool = True,
    tol: float = 0.01,
    loose: float = math.inf,
    max_products: int = 200,
    max_basis: int = 48,
    seed: int = 0,
    stop: Callable[[], bool] | None = None,
) -> Ends:
    """The `top` largest eigenpairs and the smallest one, as far as the tolerance asks for.

    Args:
        followed: rows (m, n), eigenvectors of the last time: their sum is what the search begins with.
        beside: rows (m, n) that the subspace shall hold as they are.
        bottom: whether the smallest is wanted.
        tol: error that is enough: of the largest value relative to itself, of the smallest to the largest
            |Ritz value|.
        loose: residual of the others that is enough, relative to the largest |Ritz value|.
        max_products: most products with one vector.
        max_basis: vectors in the subspace, each kept with its product.
        seed: of the random vector.
        stop: asked before every further product; where it says so, what was found is returned as it is.
    """
    n = op.shape[0]
    given = fresh(op, 0, n) if beside is None else beside.to(dtype=op.dtype, device=op.device)
    begin = torch.cat([_begin(op, followed, seed), given])
    space = Subspace(op, max(max_basis, top + 4, len(begin) + 4))
    space.add(begin)
    forms, seen = space.forms(given), list[np.ndarray]()
    while True:
        found = _Pairs(space, min(top, n), tol, bottom=bottom, seen=seen)
        limits = found.limits(tol, loose)
        enough = found.full or (
            space.count >= LEAST + 3 * bottom
            and found.moved[0] <= limits[0]
            and bool((found.errors <= limits).all())
        )
        if enough or space.products >= max_products or (stop is not None and stop()):
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
        angle=_angle(space, found.sizes[: min(top, n)]),
        forms=forms,
        converged=bool((found.errors <= limits)[found.is_end].all()),
        num_products=space.products,
        subspace=space,
    )


def _begin(op: LinearOperator, followed: Tensor | None, seed: int) -> Tensor:
    """One vector to begin with, (1, n): the sum of those that are followed, and a random one."""
    begin = fresh(op, 1, op.shape[0])
    random_vector(op, seed=seed, index=0, out=begin[0])
    if followed is None or not len(followed):
        return begin
    known = followed.to(begin).sum(dim=0, keepdim=True)
    if not float(norms(known[0])) > 0:  # a gradient of zero, for example: the random vector serves alone
        return begin
    return begin.mul_((RANDOM * norms(known[0]) / norms(begin[0])).to(begin)).add_(known)


class _Pairs:
    """The wanted Ritz pairs of a subspace: the largest first, then the smallest one.

    The largest has the error min(r, r²/gap). The smallest is mostly the edge of a bulk, where the next one is
    not known: its error is r, not less than what the last products have moved it, nor than the tolerance, for
    a search that is stopped there knows no better.
    """

    def __init__(self, space: Subspace, top: int, tol: float, *, bottom: bool, seen: list[np.ndarray]):
        theta, S = space.ritz()
        seen.append(theta[[-1, 0]])
        m = len(theta)
        high = list(range(m - 1, max(m - 1 - top, -1), -1))
        wanted = np.array([*high, 0] if bottom and 0 not in high else high)
        self.values, self.S, self.scale = theta[wanted], S[:, wanted], float(np.abs(theta).max())
        self.rows = space.residuals(self.values, self.S)
        self.sizes = to_numpy(norms(self.rows, dim=1))
        self.is_end = (wanted == m - 1) | (bottom & (wanted == 0))
        self.errors = self.sizes.copy()
        if m > 1:
            beside = norms(space.residuals(theta[m - 2 : m - 1], S[:, m - 2 : m - 1]), dim=1)
            gap = theta[-1] - theta[-2] - float(beside[0])
            if gap > 0:
                self.errors[0] = min(self.sizes[0], self.sizes[0] ** 2 / gap)
        self.moved = np.abs(seen[-1] - seen[max(len(seen) - 1 - STEADY, 0)])
        self.full = space.count == space.op.shape[0]
        if bottom and not self.full:
            self.errors[-1] = max(self.sizes[-1], self.moved[1], tol * self.scale)

    def limits(self, tol: float, loose: float) -> np.ndarray:
        """Errors that are enough, (k,)."""
        first = np.arange(len(self.values)) == 0
        own = np.where(first, np.maximum(abs(self.values[0]), FLOOR * self.scale), self.scale)
        return np.where(self.is_end, tol * own, loose * self.scale if self.scale > 0 else math.inf)

    def next(self, limits: np.ndarray) -> Tensor:
        """The residual that is worst, relative to what is allowed."""
        worst = int((np.minimum(self.errors, self.sizes) / np.maximum(limits, 1e-300)).argmax())
        return self.rows[worst : worst + 1]


def _angle(space: Subspace, residuals: np.ndarray) -> float:
    """‖R‖_F / gap for the k largest Ritz pairs, at most 1: the sin Θ theorem (Davis, Kahan).

    The gap is that between the last of them and what the next may be, its Ritz value and residual.
    """
    theta, S = space.ritz()
    k, j = len(residuals), len(theta) - len(residuals) - 1
    if j < 0:
        return 0.0
    beyond = theta[j] + float(norms(space.residuals(theta[j : j + 1], S[:, j : j + 1]), dim=1)[0])
    size, gap = float(np.linalg.norm(residuals)), float(theta[-k] - beyond)
    return min(size / gap, 1.0) if gap > 0 else 1.0


def _best(theta: np.ndarray, S: np.ndarray, room: int, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Half of the room: mostly from the high end."""
    low = max(room // 8, 1)
    high = max(room // 2 - low, top + 1)
    chosen = np.r_[0:low, len(theta) - high : len(theta)]
    return theta[chosen], S[:, chosen]


def _numbers(S: np.ndarray, like: Tensor) -> Tensor:
    return torch.as_tensor(np.ascontiguousarray(S.T)).to(like)


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

"""Search for extreme eigenpairs: Lanczos with full reorthogonalization, thick restarts and locking.

A sweep runs Lanczos from a random vector, orthogonal to the eigenvectors locked so far, and restarts from its
best Ritz vectors whenever the basis is full. When the wanted Ritz vectors have converged, it locks them, and
another sweep searches outside them for better ones. One Krylov space holds one copy of a repeated eigenvalue,
so copies come one sweep at a time. The search ends when a sweep has found nothing better and it is improbable
that it overlooked something (`Search._nothing_missed`); small residuals alone never end it, because in many
dimensions even a random vector may have one.

The search first tries given start vectors, one sweep each, which ends when the vector has converged.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.accurate_sums import dots, gram, inner, norms, to_numpy
from curvescope.algorithms.columns import columns_at_once
from curvescope.algorithms.vectors import (
    check_finite,
    fresh,
    orthogonalize,
    own_entries,
    random_vector,
    rotate,
    safe_vector_scale,
)
from curvescope.core.operator import LinearOperator
from curvescope.core.progress import track

Which = Literal["LA", "SA", "LM", "BE", "SM"]

MISS_PROBABILITY = 1e-3  # accepted probability, at each end, that the last sweep overlooked an eigenvalue
SAFETY_SHARE = 0.3  # share of the tolerance for estimated residuals
MAX_OVERLAP_SHARE = (
    0.03  # share of the tolerance for overlaps within the basis: they change residuals by as much
)


def choose(values: np.ndarray, k: int, which: Which, bonus: np.ndarray | float = 0.0) -> np.ndarray:
    """Positions of the k wanted values, best first; `bonus` counts in favor of a value.

    BE takes ⌈k/2⌉ from the high end and ⌊k/2⌋ from the low end.
    """
    high = np.argsort(-(values + bonus), kind="stable")
    low = np.argsort(values - bonus, kind="stable")
    if which == "LA":
        return high[:k]
    if which == "SA":
        return low[:k]
    if which == "LM":
        return np.argsort(-(np.abs(values) + bonus), kind="stable")[:k]
    if which == "SM":
        return np.argsort(np.abs(values) - bonus, kind="stable")[:k]
    top = high[: k - k // 2]
    return np.concatenate([top, low[~np.isin(low, top)][: k // 2]])


def thresholds(values: np.ndarray, which: Which) -> list[tuple[int, float]]:
    """Thresholds that an eigenvalue must exceed to displace one of `values`: (1, t) if λ > t, (−1, t) if −λ >
    t.
    """
    if which == "LA":
        return [(1, values.min())]
    if which == "SA":
        return [(-1, (-values).min())]
    if which == "LM":
        return [(1, np.abs(values).min()), (-1, np.abs(values).min())]
    ascending = np.sort(values)
    low, high = ascending[: len(values) // 2], ascending[len(values) // 2 :]
    return [(1, high.min())] + ([(-1, (-low).min())] if len(low) else [])


class Search:
    """State of one search. `rows` holds the locked vectors, the basis of the sweep, and the next vector.

    Memory: max_basis + 1 vectors, and what the operator needs for a product.
    """

    def __init__(
        self,
        op: LinearOperator,
        *,
        k: int,
        which: Which,
        tol: float,
        max_basis: int,
        max_products: int,
        seed: int,
        starts: Tensor | None = None,
    ):
        self.op, self.n, self.k = op, op.shape[0], k
        self.which: Which = which
        self.tol, self.max_basis, self.max_products = tol, min(max_basis, self.n), max_products
        self.seed, self.starts = seed, [] if starts is None else list(starts.T)
        self.rows = fresh(op, self.max_basis + 1, op.local_shape[0])
        self.H = np.zeros((self.max_basis, self.max_basis))  # upper triangle of the projection
        self.beta = 0.0  # norm of the last product's part outside the basis
        self.locked = np.zeros(0)  # Ritz values of the locked vectors
        self.overlap = np.zeros(0)  # overlap of the next vector with the locked ones and the basis
        self.coupling = np.zeros(0)  # entries of the projection for the next vector and the basis
        self.factor = 0.0  # scale of products, set after the first one
        self.scale, self.products, self.sweeps = 0.0, 0, 0
        self.verified = False
        self._begin()

    def run(self) -> None:
        """Search until nothing better is found or the products are used up."""
        for _ in track(range(self.max_products), "eigenpairs"):
            self._step()
            if self._check_is_due() and self._check():
                return

    @property
    def _given(self) -> bool:
        """Return True if the sweep started from a given vector."""
        return self.sweeps <= len(self.starts)

    def _begin(self) -> None:
        """Start a sweep from the next given vector, or a random one, outside the locked ones."""
        v, num_locked = self.rows[len(self.locked)], len(self.locked)
        remainder = 0.0
        while remainder == 0.0:  # a given vector may lie in the span of the locked ones
            if self.sweeps < len(self.starts):
                v.copy_(self.starts[self.sweeps])
            else:
                random_vector(self.op, seed=self.seed, index=self.sweeps, out=v)
            self.sweeps += 1
            _, remainder, overlap, _ = orthogonalize(self.rows[:num_locked], v)
            v /= remainder or 1.0
            self.overlap = overlap / (remainder or 1.0)
        self.count, self.num_kept, self.coupling = 0, 0, np.zeros(0)
        self.dropped, self.log_beta = np.zeros(0), 0.0

    def multiply(self, v: Tensor) -> Tensor:
        """Multiply v by the operator, scaled by `factor`."""
        product = self.op @ v
        if self.factor == 0.0:
            self.factor = safe_vector_scale(product)
        return product if self.factor in (0.0, 1.0) else product * self.factor

    def _step(self) -> None:
        """Take one step: a product, a new column of the projection and the next basis vector."""
        num_locked, last = len(self.locked), len(self.locked) + self.count
        q, w = self.rows[last], self.rows[last + 1]
        product = self.multiply(q)
        outside, alpha = to_numpy(dots(self.rows[:num_locked], product)), float(inner(q, product))
        expected = self._expected(outside, alpha)
        remainder = orthogonalize(
            self.rows[: last + 1], product, out=w, expected=expected, tol=MAX_OVERLAP_SHARE * self.tol
        )
        self.beta = remainder.norm
        check_finite(remainder.coefficients, self.beta)
        self.H[: self.count + 1, self.count] = remainder.coefficients[num_locked:]
        w /= self.beta or 1.0
        self.overlap = remainder.overlap / (self.beta or 1.0)
        self.coupling = np.append(np.zeros(self.count), self.beta)
        self.log_beta += math.log(self.beta) if self.beta else -math.inf
        self.count += 1
        self.products += 1

    def _expected(self, outside: np.ndarray, alpha: float) -> np.ndarray:
        """Inner products of locked vectors and basis V with A q, before those of V are measured.

        The last vector q is orthogonal to the others only up to `overlap`. Vᵀ A q = T Vᵀ q except for the
        last entry, qᵀ A q = α. The column of T for q starts with the coupling of the last step, or, after a
        restart, with the residuals of the kept Ritz vectors. The inner products of the locked vectors are
        measured: they are inner products of their residuals with q, as large as the tolerance.
        """
        num_locked, m = len(self.locked), self.count
        T = np.triu(self.H[:m, :m])
        T = T + np.triu(T, 1).T
        inside = T @ self.overlap[num_locked:] + self.coupling
        return np.concatenate([outside, inside, [alpha]])

    @property
    def _full(self) -> bool:
        return len(self.locked) + self.count == self.max_basis

    def _check_is_due(self) -> bool:
        """Return True after 1, 2, 4, 8, 16, 24, … steps of a sweep, and after every step near its end."""
        new = self.count - self.num_kept
        ending = self._full or self.products == self.max_products or self.beta == 0
        return ending or self._given or len(self.locked) == self.k or new in (1, 2, 4) or new % 8 == 0

    def _check(self) -> bool:
        """Decide what to do with the sweep; True when the search is over."""
        theta, S, residual = self._ritz()
        wanted = self._wanted(theta)
        small = residual <= SAFETY_SHARE * self.tol * self.scale
        enough = len(self.locked) + self.count >= self.k
        settled = enough and len(wanted) > 0 and bool(small[wanted].all())
        lead = int(np.abs(S[0]).argmax())  # the Ritz vector closest to the given start
        tracked = self._given and (not len(wanted) or (self.num_kept == 0 and bool(small[lead])))
        spent = self.products == self.max_products
        is_complete = len(self.locked) + self.count == self.n
        if not (len(wanted) or self._given) and self._nothing_missed(theta, residual):
            self.verified = True
        elif self.beta == 0 or settled or tracked or spent or is_complete:
            only_lead = tracked and not settled
            self._lock(
                np.array([lead] if lead in wanted else [], dtype=int) if only_lead else wanted, theta, S
            )
            self.verified = is_complete
            if not (is_complete or spent):
                self._begin()
        elif self._full:
            self._restart(theta, S)
        return self.verified or spent

    def _ritz(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ritz values and vectors of the sweep, and their residuals β |s_m|."""
        H = np.triu(self.H[: self.count, : self.count])
        theta, S = np.linalg.eigh(H + np.triu(H, 1).T)
        self.scale = max(self.scale, float(np.abs(theta).max()))
        return theta, S, self.beta * np.abs(S[-1])

    def _wanted(self, theta: np.ndarray) -> np.ndarray:
        """Positions of the Ritz values that belong to the k best, locked ones included; ties stay locked."""
        bonus = np.zeros(len(self.locked) + len(theta))
        bonus[: len(self.locked)] = self.tol * self.scale
        best = choose(np.concatenate([self.locked, theta]), self.k, self.which, bonus)
        return best[best >= len(self.locked)] - len(self.locked)

    def _lock(self, converged: np.ndarray, theta: np.ndarray, S: np.ndarray) -> None:
        """Lock the converged Ritz vectors and drop those that they displace."""
        before = len(self.locked)
        rotate(self.rows[before : before + self.count], S[:, converged])
        values = np.concatenate([self.locked, theta[converged]])
        bonus = np.where(np.arange(len(values)) < before, self.tol * self.scale, 0.0)
        kept_positions = np.sort(choose(values, self.k, self.which, bonus))
        for target, source in enumerate(kept_positions):
            if target != source:
                self.rows[target] = self.rows[int(source)]
        self.locked = values[kept_positions]

    def _restart(self, theta: np.ndarray, S: np.ndarray) -> None:
        """Keep the wanted Ritz vectors, half of the others, and the next vector of the sweep."""
        num_locked, size = len(self.locked), self.count
        num_wanted = max(1, self.k - num_locked)
        keep = choose(theta, min(size - 2, num_wanted + (size - num_wanted) // 2), self.which)
        rotate(self.rows[num_locked : num_locked + size], S[:, keep])
        self.rows[num_locked + len(keep)] = self.rows[num_locked + size]
        self.H[:] = 0
        self.H[range(len(keep)), range(len(keep))] = theta[keep]
        self.dropped = np.concatenate([self.dropped, np.delete(theta, keep)])
        self.coupling = self.beta * S[-1, keep]
        self.overlap = np.concatenate([self.overlap[:num_locked], S[:, keep].T @ self.overlap[num_locked:]])
        self.count = self.num_kept = len(keep)

    def _nothing_missed(self, theta: np.ndarray, residual: np.ndarray) -> bool:
        """Return True if a sweep from a random vector q shows that no better eigenvalue exists.

        An eigenvector u of λ outside the locked ones has uᵀ A V = λ uᵀ V, so its inner products with the
        basis follow from η, its inner product with the next vector: (uᵀ xᵢ) = η rᵢ / (λ − θᵢ) for Ritz
        vectors with residuals rᵢ, and, through all steps and restarts, (uᵀ q) = η Π β / Π (λ − θ), over every
        β and every Ritz value, kept or dropped. As u is a unit vector,

            (uᵀ q)² ≤ (Π β / Π (λ − θ))² / (1 + Σ (rᵢ / (λ − θᵢ))²),

        the Christoffel function, which falls as λ moves outwards. A random q has (uᵀ q)² < π p² / 2n with
        probability at most p. If the bound is below this value at the wanted eigenvalues plus the tolerance,
        an eigenvalue was missed with probability at most p.
        """
        margin, unlikely = (
            self.tol * self.scale,
            math.log(math.pi / (2 * self.n)) + 2 * math.log(MISS_PROBABILITY),
        )
        for sign, threshold in thresholds(self.locked, self.which):
            distance = threshold + margin - sign * theta
            dropped_distance = threshold + margin - sign * self.dropped
            if self.beta > 0 and (distance.min() <= 0 or dropped_distance.min(initial=1.0) <= 0):
                return False
            if self.beta > 0:
                overlap = 2 * (self.log_beta - np.log(distance).sum() - np.log(dropped_distance).sum())
                if overlap - math.log1p(float(((residual / distance) ** 2).sum())) > unlikely:
                    return False
        return True


class SearchResult(NamedTuple):
    """Eigenpairs, best first, with their residuals and status."""

    values: np.ndarray  # (k,)
    Y: Tensor  # (k, n)
    residuals: np.ndarray  # (k,) measured
    scale: float  # largest |eigenvalue| seen
    verified: bool  # True if no better eigenvalue was found
    products: int
    reason: str = ""  # reason if they are not resolved


def solved_directly(op: LinearOperator, k: int, which: Which) -> SearchResult:
    """Solve from the matrix in float64; residuals include the rounding of vectors in the operator's type."""
    A = to_numpy(op.to_dense())
    check_finite(A)
    theta, S = np.linalg.eigh((A + A.T) / 2)
    best = choose(theta, k, which)
    best = np.sort(best) if which == "BE" else best
    values, S = theta[best], S[:, best]
    scale = float(np.abs(theta).max())
    residuals = np.linalg.norm(A @ S - S * values, axis=0) + torch.finfo(op.dtype).eps * scale
    Y = own_entries(op, torch.as_tensor(S)).T.to(op.dtype, copy=True).contiguous()
    return SearchResult(values, Y, residuals, scale, True, op.shape[0])


def filled(search: Search) -> Tensor:
    """Locked vectors (k, n), filled up with random ones if the products did not suffice."""
    Y, index = search.rows[: search.k], search.sweeps
    for count in range(len(search.locked), search.k):
        remainder = 0.0
        while remainder == 0.0:
            random_vector(search.op, seed=search.seed, index=index, out=Y[count])
            remainder = orthogonalize(Y[:count], Y[count]).norm
            Y[count] /= remainder or 1.0
            index += 1
    return Y


def measured(search: Search) -> SearchResult:
    """Rayleigh–Ritz on the span of the k vectors of a search.

    The products reuse the memory of the basis; k further vectors are needed only if it was shorter than 2k.
    """
    Y, k, factor = filled(search), search.k, search.factor or 1.0
    products = search.rows[k : 2 * k] if len(search.rows) >= 2 * k else None
    values, residuals = rayleigh_ritz(search.op, Y, search.which, factor=factor, out=products)
    return SearchResult(values, Y, residuals, search.scale / factor, search.verified, search.products + k)


def rayleigh_ritz(
    op: LinearOperator, Y: Tensor, which: Which, *, factor: float = 1.0, out: Tensor | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Compute Ritz values and residuals (k,) on the rows of Y (k, n), which are overwritten by Ritz vectors.

    Args:
        factor: Scale that brings products near one.
        out: Buffer (k, n) for the products.
    """
    P, k = torch.empty_like(Y) if out is None else out, len(Y)
    width = columns_at_once(op)
    for start in range(0, k, width):
        P[start : start + width] = (op @ Y[start : start + width].T).T
    if factor != 1.0:
        P *= factor
    H, L = gram(Y, P), np.linalg.cholesky(gram(Y, Y))  # the rows of Y are orthonormal up to float32
    check_finite(H)
    H = np.linalg.solve(L, np.linalg.solve(L, (H + H.T) / 2).T)
    theta, S = np.linalg.eigh((H + H.T) / 2)
    S = np.linalg.solve(L.T, S)
    order = np.arange(k) if which == "BE" else choose(theta, k, which)
    values, S = theta[order], S[:, order]
    rotate(Y, S)
    rotate(P, S)
    for value, vector, product in zip(values, Y, P, strict=True):
        product.sub_(vector, alpha=float(value))
    return values / factor, to_numpy(norms(P, dim=1)) / factor

"""Both ends of the spectrum of a slowly changing operator, starting from earlier eigenvectors.

A subspace V with its products A V starts with one vector, the sum of the previous eigenvectors and a random
one, and with vectors given by the caller. Rayleigh–Ritz on V gives Ritz pairs (θ, u). While a wanted pair has
a residual r = A u − θ u above its tolerance, r is added to V. Started with one vector this is Lanczos: all
residuals are multiples of its next vector. It takes about k products to separate k eigenvectors that are in
the sum.

A symmetric operator has an eigenvalue within ‖r‖ of θ, and θ_max ≤ λ_max, θ_min ≥ λ_min. Unlike `eigsh`, this
does not verify that no eigenvalue lies beyond them: a sweep from a random vector would take as many products
as a full search. Instead, a random vector is part of every start.

`search_top` has such a bound from few products: it begins with a random vector x alone, so that V is the
Krylov space of x. For the monic polynomial p whose roots are the Ritz values, ‖p(A) x‖ is the product of the
β of Lanczos, and not less than |xᵀ u| p(λ) for every eigenpair (λ, u). A random direction has |xᵀ u| above a
known quantile, so the λ at which p(λ) times the quantile equals ‖p(A) x‖ is above λ_max with that probability
(van Dorsselaer, Hochstenbach and van der Vorst 2000, SIAM J. Matrix Anal. Appl. 22, 837–852).

`track_top` takes three to six products and has no such bound: it begins with the sum of earlier eigenvectors,
and its error is that of the Ritz pair it has found.

Traces from probes and a subspace whose products are known: exact inside it, sampled outside.

For orthonormal rows V (m, n) with A V known and T = V A Vᵀ, Q = Vᵀ and P = I − Q Qᵀ,

    A = P A P + (Q Qᵀ A + A Q Qᵀ − Q T Qᵀ),

the diagonal of the bracket is known, and that of P A P is the mean of x ∘ P A P x over probes x of signs,
with P A P x = P (A x − A Q (Qᵀ x)) computed from A x. The subspace contains the dominant eigenvectors, so the
samples vary far less than those of A (as in Hutch++, Meyer and others 2021). V must not depend on the probes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import beta
from torch import Tensor

from curvescope.algorithms.accurate_sums import gram, norms, sum_over_ranks, to_numpy
from curvescope.algorithms.checks import fixed_operator
from curvescope.algorithms.columns import columns_at_once, mean_and_stderr
from curvescope.algorithms.vectors import check_finite, fresh, orthogonalize, random_vector, rotate
from curvescope.core.operator import LinearOperator

MIN_OUTSIDE = 1e-6  # share of a vector's length: a smaller part outside the subspace is rounding
VALUE_FLOOR = 0.05  # share of the largest |Ritz value|: the error of a smaller λ_max is relative to this
RANDOM_LENGTH = 0.5  # length of the random vector, relative to the sum of the previous eigenvectors
MIN_VECTORS = 6  # smallest size of a subspace for one end; both ends need three more
MIN_TRACKED = 3  # smallest size of a subspace that starts with earlier eigenvectors
STEADY_PRODUCTS = 3  # number of products over which the ends must not change
BISECTIONS = 50
MISS_PROBABILITY = 0.01  # probability of an eigenvalue above the bound of `search_top`


class TrackedEnds(NamedTuple):
    """Largest eigenvalues, descending, then the smallest if requested, with their residuals."""

    values: np.ndarray  # (k,)
    residuals: np.ndarray  # (k,)
    errors: np.ndarray  # (k,) see `_Pairs`; residuals for values between the two ends
    vectors: Tensor  # (k, n) orthonormal rows
    angle: float  # bound of the sine of the angle to the true top eigenspace: see `_angle`
    forms: np.ndarray  # xᵀ A x / xᵀ x of the vectors in `include`
    converged: bool  # both ends have errors within the tolerance
    num_products: int
    subspace: Subspace
    upper: float = (
        math.inf
    )  # above all eigenvalues, except with probability `MISS_PROBABILITY`; inf: not known


class Subspace:
    """Orthonormal rows V (m, n) with the products A V and the projection V A Vᵀ.

    Memory: 2 · `capacity` vectors.
    """

    def __init__(self, op: LinearOperator, capacity: int):
        self.op, self.capacity = op, min(capacity, op.shape[0])
        n = op.local_shape[0]
        self._V, self._AV = fresh(op, self.capacity, n), fresh(op, self.capacity, n)
        self.H = np.zeros((self.capacity, self.capacity))
        self.count, self.products = 0, 0
        self.chain = 0  # number of first vectors that are the Krylov space of a random one

    @property
    def V(self) -> Tensor:
        """(m, n)."""
        return self._V[: self.count]

    @property
    def AV(self) -> Tensor:
        """(m, n)."""
        return self._AV[: self.count]

    def add(self, rows: Tensor) -> int:
        """Add the parts of rows (k, n) outside the subspace, one product each; return the number of new
        directions.
        """
        num_before = self.count
        for row in rows[: self.capacity - num_before]:
            self._append(row)
        new = slice(num_before, self.count)
        width = columns_at_once(self.op)
        for start in range(num_before, self.count, width):
            batch = slice(start, min(start + width, self.count))
            self._AV[batch] = (self.op @ self._V[batch].T).T
        self.products += self.count - num_before
        if self.count > num_before:
            block = gram(self.V, self._AV[new])
            check_finite(block)
            self.H[: self.count, new] = block
            self.H[new, : self.count] = block.T
        return self.count - num_before

    def _append(self, row: Tensor) -> None:
        w = self._V[self.count]
        length = float(norms(row))
        if not length > 0:
            return
        torch.div(row, length, out=w)
        remainder = orthogonalize(self.V, w).norm
        if remainder > MIN_OUTSIDE:
            w /= remainder
            orthogonalize(self.V, w)
            self.count += 1

    def ritz(self) -> tuple[np.ndarray, np.ndarray]:
        """Return Ritz values, ascending, and their vectors in coordinates of V, as columns."""
        H = self.H[: self.count, : self.count]
        return np.linalg.eigh((H + H.T) / 2)

    def rows(self, S: np.ndarray) -> Tensor:
        """Sᵀ V for columns S (m, k): (k, n)."""
        return _numbers(S, self.V) @ self.V

    def upper_bound(self) -> float:
        """Bound of λ_max from a space that is the Krylov space of its first vector, a random one.

        The x above all Ritz values θ_i at which Σ log(x − θ_i) = Σ log β_j − log c; c is the component of a
        random direction that is exceeded with probability 1 − `MISS_PROBABILITY`.
        """
        m, n = self.count, self.op.shape[0]
        theta = self.ritz()[0]
        if m == n:
            return float(theta[-1])
        outside = float(norms(self._AV[m - 1] - _numbers(self.H[:m, m - 1 : m], self.V)[0] @ self.V))
        betas = np.append(np.abs(np.diagonal(self.H[:m, :m], 1)), outside)
        if not (betas > 0).all():
            return float(theta[-1])
        squared = float(beta.ppf(MISS_PROBABILITY, 0.5, (n - 1) / 2))
        target = float(np.log(betas).sum()) - math.log(squared) / 2
        low, high = 0.0, math.exp(target / m)  # Σ log(x − θ_i) ≥ m log(x − θ_max)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if np.log(theta[-1] - theta + middle).sum() < target:
                low = middle
            else:
                high = middle
        return float(theta[-1]) + high

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
        """Reduce the subspace to these Ritz pairs."""
        rotate(self.V, S)
        rotate(self.AV, S)
        self.count, self.chain = len(theta), 0
        self.H[:] = 0
        self.H[range(self.count), range(self.count)] = theta


@fixed_operator
def follow_ends(
    op: LinearOperator,
    previous: Tensor | None = None,
    include: Tensor | None = None,
    *,
    top: int = 1,
    bottom: bool = True,
    tol: float = 0.01,
    other_tol: float = math.inf,
    max_products: int = 200,
    max_basis: int = 48,
    seed: int = 0,
    stop: Callable[[], bool] | None = None,
    resume: Subspace | None = None,
    upper: float = math.inf,
) -> TrackedEnds:
    """Estimate the `top` largest eigenpairs and the smallest one, up to a tolerance.

    Args:
        previous: Rows (m, n), eigenvectors of an earlier search; the search starts from their sum.
        include: Rows (m, n) that the subspace must contain.
        bottom: If True, also find the smallest eigenvalue.
        tol: Sufficient error of the largest value, relative to itself, and of the smallest value, relative to
            the largest |Ritz value|.
        other_tol: Sufficient residual of the other values, relative to the largest |Ritz value|.
        max_products: Largest number of products with one vector.
        max_basis: Number of vectors in the subspace, which are stored with their products.
        seed: Seed of the random vector.
        stop: Called before every product; if it returns True, the search returns its current result.
        resume: Subspace of an earlier search of the same matrix, to be extended; it already contains
            `include`.
        upper: Upper bound of all eigenvalues from an earlier search; the error of the largest includes it.
    """
    n = op.local_shape[0]
    included = fresh(op, 0, n) if include is None else include.to(dtype=op.dtype, device=op.device)
    if resume is None:
        start = torch.cat([_begin(op, previous, seed), included])
        space = Subspace(op, max(max_basis, top + 4, len(start) + 4))
        products_before = 0
        space.add(start)
    else:
        space, products_before = resume, resume.products
        space.op = op
    forms, history = space.forms(included), list[np.ndarray]()
    while True:
        pairs = _Pairs(space, min(top, n), tol, bottom=bottom, seen=history)
        limits = pairs.limits(tol, other_tol)
        is_enough = pairs.full or (
            space.count >= MIN_VECTORS + 3 * bottom
            and pairs.change[0] <= limits[0]
            and bool((pairs.errors <= limits).all())
        )
        if is_enough or space.products - products_before >= max_products or (stop is not None and stop()):
            break
        if space.count == space.capacity:
            space.keep(*_best(*space.ritz(), space.capacity, top))
        if not space.add(pairs.next(limits)):
            break
    pairs.reach(upper)
    return TrackedEnds(
        values=pairs.values,
        residuals=pairs.sizes,
        errors=pairs.errors,
        vectors=space.rows(pairs.S),
        angle=_angle(space, pairs.sizes[: min(top, n)]),
        forms=forms,
        converged=bool((pairs.errors <= limits)[pairs.is_end].all()),
        num_products=space.products - products_before,
        subspace=space,
        upper=upper,
    )


@fixed_operator
def search_top(
    op: LinearOperator,
    known: Tensor | None = None,
    *,
    top: int = 1,
    tol: float = 0.01,
    max_products: int = 60,
    max_basis: int = 48,
    seed: int = 0,
    stop: Callable[[], bool] | None = None,
    resume: Subspace | None = None,
) -> TrackedEnds:
    """Estimate the `top` largest eigenpairs; the error of the largest allows for eigenvalues not found.

    The error of the largest reaches from its Ritz value to the bound from the random start. It covers
    directions that the search has missed, except with probability `MISS_PROBABILITY`.

    Args:
        known: Rows (m, n) that may be close to the largest eigenvector, such as that of an earlier search and
            a gradient. They are added to the subspace if the random start alone does not reach `tol`.
        tol: Sufficient error, relative to the largest value.
        max_products: Largest number of products with one vector.
        max_basis: Number of vectors in the subspace, which are stored with their products.
        seed: Seed of the random vector.
        stop: Called before every product; if it returns True, the search returns its current result.
        resume: Subspace of an earlier `search_top` of the same matrix, to be extended.
    """
    n = op.shape[0]
    known = fresh(op, 0, op.local_shape[0]) if known is None else known.to(dtype=op.dtype, device=op.device)
    if resume is None:
        space, products_before = Subspace(op, max(max_basis, top + 4, len(known) + 4)), 0
        start = fresh(op, 1, op.local_shape[0])
        random_vector(op, seed=seed, index=0, out=start[0])
        space.add(start)
        space.chain = space.count
    else:
        space, products_before = resume, resume.products
        space.op, space.count = op, resume.chain
    max_total = min(
        max_products - len(known) + products_before,
        space.products + space.capacity - space.count - len(known),
    )
    while True:
        theta, upper = float(space.ritz()[0][-1]), space.upper_bound()
        scale = float(np.abs(space.ritz()[0]).max())
        is_enough = upper - theta <= tol * max(abs(theta), VALUE_FLOOR * scale)
        if is_enough or space.products >= max_total or (stop is not None and stop()):
            break
        if not space.add(space.AV[-1:].clone()):
            break
        space.chain = space.count
    if not is_enough and not (stop is not None and stop()):
        space.add(known)
    pairs = _Pairs(space, min(top, n), tol, bottom=False, seen=[])
    pairs.reach(upper)
    return TrackedEnds(
        values=pairs.values,
        residuals=pairs.sizes,
        errors=pairs.errors,
        vectors=space.rows(pairs.S),
        angle=_angle(space, pairs.sizes),
        forms=np.zeros(0),
        converged=bool(pairs.errors[0] <= pairs.limits(tol, math.inf)[0]),
        num_products=space.products - products_before,
        subspace=space,
        upper=upper,
    )


@fixed_operator
def track_top(
    op: LinearOperator,
    previous: Tensor,
    *,
    top: int = 1,
    tol: float = 0.05,
    max_products: int = 10,
    stop: Callable[[], bool] | None = None,
) -> TrackedEnds:
    """Estimate the `top` largest eigenpairs by Lanczos from the sum of earlier eigenvectors.

    The matrix has an eigenvalue within the error of the largest value. A search that starts orthogonal to an
    eigenvector does not meet it; `search_top` bounds such eigenvalues.

    Args:
        previous: Rows (m, n), eigenvectors of an earlier search.
        tol: Sufficient error, relative to the largest value.
        max_products: Largest number of products with one vector.
        stop: Called before every product; if it returns True, the search returns its current result.
    """
    space = Subspace(op, max(max_products, top + 4))
    space.add(previous.to(dtype=op.dtype, device=op.device).sum(dim=0, keepdim=True))
    while True:
        pairs = _Pairs(space, min(top, space.count), tol, bottom=False, seen=[])
        enough = space.count >= MIN_TRACKED and bool(pairs.errors[0] <= pairs.limits(tol, math.inf)[0])
        if pairs.full or enough or space.products >= max_products or (stop is not None and stop()):
            break
        if not space.add(pairs.rows[:1]):
            break
    return TrackedEnds(
        values=pairs.values,
        residuals=pairs.sizes,
        errors=pairs.errors,
        vectors=space.rows(pairs.S),
        angle=_angle(space, pairs.sizes),
        forms=np.zeros(0),
        converged=bool(pairs.errors[0] <= pairs.limits(tol, math.inf)[0]),
        num_products=space.products,
        subspace=space,
    )


def _begin(op: LinearOperator, previous: Tensor | None, seed: int) -> Tensor:
    """Start vector (1, n): the sum of the previous eigenvectors and a random vector."""
    begin = fresh(op, 1, op.local_shape[0])
    random_vector(op, seed=seed, index=0, out=begin[0])
    if previous is None or not len(previous):
        return begin
    known = previous.to(begin).sum(dim=0, keepdim=True)
    if not float(norms(known[0])) > 0:  # zero, for example a zero gradient: only the random vector is used
        return begin
    return begin.mul_((RANDOM_LENGTH * norms(known[0]) / norms(begin[0])).to(begin)).add_(known)


class _Pairs:
    """Wanted Ritz pairs of a subspace: the largest first, then the smallest one.

    The error of the largest is min(r, r²/gap), and at least its change by the last product. The smallest is
    usually the edge of a bulk, so its gap is unknown. Its error is r, and at least the change over the last
    products and the tolerance, because a search that stops there has no better estimate.
    """

    def __init__(self, space: Subspace, top: int, tol: float, *, bottom: bool, seen: list[np.ndarray]):
        theta, S = space.ritz()
        seen.append(theta[[-1, 0]])
        m = len(theta)
        high = list(range(m - 1, max(m - 1 - top, -1), -1))
        positions = np.array([*high, 0] if bottom and 0 not in high else high)
        self.values, self.S, self.scale = theta[positions], S[:, positions], float(np.abs(theta).max())
        self.rows = space.residuals(self.values, self.S)
        self.sizes = to_numpy(norms(self.rows, dim=1))
        self.is_end = (positions == m - 1) | (bottom & (positions == 0))
        self.errors = self.sizes.copy()
        if m > 1:
            neighbor_norm = norms(space.residuals(theta[m - 2 : m - 1], S[:, m - 2 : m - 1]), dim=1)
            gap = theta[-1] - theta[-2] - float(neighbor_norm[0])
            if gap > 0:
                self.errors[0] = min(self.sizes[0], self.sizes[0] ** 2 / gap)
            if (
                space.count < space.op.shape[0]
            ):  # a residual does not show an eigenvector that has just appeared
                before = np.linalg.eigvalsh(space.H[: m - 1, : m - 1])[-1]
                self.errors[0] = max(self.errors[0], theta[-1] - before)
        self.change = np.abs(seen[-1] - seen[max(len(seen) - 1 - STEADY_PRODUCTS, 0)])
        self.full = space.count == space.op.shape[0]
        if bottom and not self.full:
            self.errors[-1] = max(self.sizes[-1], self.change[1], tol * self.scale)

    def limits(self, tol: float, other_tol: float) -> np.ndarray:
        """Return the sufficient errors, (k,)."""
        is_largest = np.arange(len(self.values)) == 0
        scales = np.where(is_largest, np.maximum(abs(self.values[0]), VALUE_FLOOR * self.scale), self.scale)
        return np.where(self.is_end, tol * scales, other_tol * self.scale if self.scale > 0 else math.inf)

    def reach(self, upper: float) -> None:
        """Extend the error of the largest value to an upper bound of all, unless the value exceeds it."""
        if self.full or not math.isfinite(upper):
            return
        beyond, rounding = upper - self.values[0], float(torch.finfo(self.rows.dtype).eps) * self.scale
        self.errors[0] = max(beyond, rounding) if beyond >= -rounding else self.errors[0] - beyond

    def next(self, limits: np.ndarray) -> Tensor:
        """Return the residual that is largest relative to its limit."""
        worst = int((np.minimum(self.errors, self.sizes) / np.maximum(limits, 1e-300)).argmax())
        return self.rows[worst : worst + 1]


def _angle(space: Subspace, residuals: np.ndarray) -> float:
    """‖R‖_F / gap for the k largest Ritz pairs, at most 1: the sin Θ theorem (Davis, Kahan).

    The gap is between the last of these pairs and the next Ritz value plus its residual.
    """
    theta, S = space.ritz()
    k, j = len(residuals), len(theta) - len(residuals) - 1
    if j < 0:
        return 0.0
    beyond = theta[j] + float(norms(space.residuals(theta[j : j + 1], S[:, j : j + 1]), dim=1)[0])
    size, gap = float(np.linalg.norm(residuals)), float(theta[-k] - beyond)
    return min(size / gap, 1.0) if gap > 0 else 1.0


def _best(theta: np.ndarray, S: np.ndarray, capacity: int, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose Ritz pairs to fill half of the subspace, mostly from the high end."""
    low = max(capacity // 8, 1)
    high = max(capacity // 2 - low, top + 1)
    chosen = np.r_[0:low, len(theta) - high : len(theta)]
    return theta[chosen], S[:, chosen]


def _numbers(S: np.ndarray, like: Tensor) -> Tensor:
    return torch.as_tensor(np.ascontiguousarray(S.T)).to(like)


class Outside:
    """Estimates outside a subspace, from probes."""

    def __init__(self, subspace: Subspace):
        self.V, self.AV = subspace.V, subspace.AV
        self.T = torch.as_tensor(subspace.H[: subspace.count, : subspace.count]).to(self.V)

    def block_samples(self, X: Tensor, AX: Tensor, blocks: Sequence[slice]) -> tuple[np.ndarray, np.ndarray]:
        """Return traces of diagonal blocks: the known part (B,), and samples (p, B) of the rest."""
        inside = 2 * (self.V * self.AV).sum(0) - (self.V * (self.T @ self.V)).sum(0)
        outside = AX - self.AV.T @ sum_over_ranks(self.V @ X)
        outside = X * (outside - self.V.T @ sum_over_ranks(self.V @ outside))
        exact = sum_over_ranks(torch.stack([inside[rows].double().sum() for rows in blocks]))
        samples = sum_over_ranks(torch.stack([outside[rows].double().sum(0) for rows in blocks], dim=1))
        return to_numpy(exact), to_numpy(samples)


def ratio_and_stderr(BX: Tensor, AX: Tensor) -> tuple[float, float]:
    """‖B‖_F / ‖A‖_F from B X and A X (n, p), and its standard error, to first order.

    The squares are means of ‖B x‖² and ‖A x‖²; their ratio varies as b − ρ a over the probes.
    """
    b, a = to_numpy(norms(BX, dim=0)) ** 2, to_numpy(norms(AX, dim=0)) ** 2
    if not a.mean() > 0:
        return float("nan"), float("nan")
    square = b.mean() / a.mean()
    stderr = float(mean_and_stderr(b - square * a)[1]) / a.mean()
    return float(np.sqrt(square)), stderr / (2 * np.sqrt(square)) if square > 0 else 0.0

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

from curvescope.algorithms.accurate_sums import add_up, gram, norms, to_numpy
from curvescope.algorithms.checks import fixed_operator
from curvescope.algorithms.columns import columns_at_once, mean_and_stderr
from curvescope.algorithms.vectors import check_finite, fresh, orthogonalize, random_vector, rotate
from curvescope.core.operator import LinearOperator

LOST = 1e-6  # of a vector's length: less than this outside the subspace is rounding
FLOOR = 0.05  # of the largest |Ritz value|: a largest value that is smaller is measured by this
RANDOM = 0.5  # length of the random vector beside that of what is followed
LEAST = 6  # vectors in a subspace that is enough for one end, and three more for both
LEAST_TRACKED = 3  # vectors in a subspace that begins with the sum of earlier eigenvectors
STEADY = 3  # products over which the ends must have come to rest
BISECTIONS = 50
MISSED = 0.01  # probability of an eigenvalue above the bound of `search_top`


class TrackedEnds(NamedTuple):
    """Largest eigenvalues, descending, then the smallest if requested, with their residuals."""

    values: np.ndarray  # (k,)
    residuals: np.ndarray  # (k,)
    errors: np.ndarray  # (k,) see `_Pairs`; the residual of those between
    vectors: Tensor  # (k, n) orthonormal rows
    angle: float  # bound of the sine of the angle to the true top eigenspace: see `_angle`
    forms: np.ndarray  # xᵀ A x / xᵀ x of the vectors in `beside`
    converged: bool  # both ends have errors within the tolerance
    num_products: int
    subspace: Subspace
    upper: float = math.inf  # above all eigenvalues, except with probability `MISSED`; inf: not known


class Subspace:
    """Orthonormal rows V (m, n) with the products A V and the projection V A Vᵀ.

    Memory: 2 · `room` vectors.
    """

    def __init__(self, op: LinearOperator, room: int):
        self.op, self.room = op, min(room, op.shape[0])
        n = op.local_shape[0]
        self._V, self._AV = fresh(op, self.room, n), fresh(op, self.room, n)
        self.H = np.zeros((self.room, self.room))
        self.count, self.products = 0, 0
        self.chain = 0  # first vectors that are the Krylov space of a random one

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
        """Return Ritz values, ascending, and their vectors in coordinates of V, as columns."""
        H = self.H[: self.count, : self.count]
        return np.linalg.eigh((H + H.T) / 2)

    def rows(self, S: np.ndarray) -> Tensor:
        """Sᵀ V for columns S (m, k): (k, n)."""
        return _numbers(S, self.V) @ self.V

    def upper_bound(self) -> float:
        """Bound of λ_max from a space that is the Krylov space of its first vector, a random one.

        The x above all Ritz values θ_i at which Σ log(x − θ_i) = Σ log β_j − log c; c is the component of a
        random direction that is exceeded with probability 1 − `MISSED`.
        """
        m, n = self.count, self.op.shape[0]
        theta = self.ritz()[0]
        if m == n:
            return float(theta[-1])
        outside = float(norms(self._AV[m - 1] - _numbers(self.H[:m, m - 1 : m], self.V)[0] @ self.V))
        betas = np.append(np.abs(np.diagonal(self.H[:m, :m], 1)), outside)
        if not (betas > 0).all():
            return float(theta[-1])
        squared = float(beta.ppf(MISSED, 0.5, (n - 1) / 2))
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
        """Drop all but these Ritz pairs."""
        rotate(self.V, S)
        rotate(self.AV, S)
        self.count, self.chain = len(theta), 0
        self.H[:] = 0
        self.H[range(self.count), range(self.count)] = theta


@fixed_operator
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
    go_on: Subspace | None = None,
    upper: float = math.inf,
) -> TrackedEnds:
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
        go_on: subspace of an earlier search of the same matrix, which is extended; it holds `beside` already.
        upper: bound of all eigenvalues from an earlier search; the error of the largest reaches up to it.
    """
    n = op.local_shape[0]
    given = fresh(op, 0, n) if beside is None else beside.to(dtype=op.dtype, device=op.device)
    if go_on is None:
        begin = torch.cat([_begin(op, followed, seed), given])
        space = Subspace(op, max(max_basis, top + 4, len(begin) + 4))
        before = 0
        space.add(begin)
    else:
        space, before = go_on, go_on.products
        space.op = op
    forms, seen = space.forms(given), list[np.ndarray]()
    while True:
        found = _Pairs(space, min(top, n), tol, bottom=bottom, seen=seen)
        limits = found.limits(tol, loose)
        enough = found.full or (
            space.count >= LEAST + 3 * bottom
            and found.moved[0] <= limits[0]
            and bool((found.errors <= limits).all())
        )
        if enough or space.products - before >= max_products or (stop is not None and stop()):
            break
        if space.count == space.room:
            space.keep(*_best(*space.ritz(), space.room, top))
        if not space.add(found.next(limits)):
            break
    found.reach(upper)
    return TrackedEnds(
        values=found.values,
        residuals=found.sizes,
        errors=found.errors,
        vectors=space.rows(found.S),
        angle=_angle(space, found.sizes[: min(top, n)]),
        forms=forms,
        converged=bool((found.errors <= limits)[found.is_end].all()),
        num_products=space.products - before,
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
    go_on: Subspace | None = None,
) -> TrackedEnds:
    """The `top` largest eigenpairs, the first with an error that counts eigenvalues that were not met.

    The error of the largest reaches from its Ritz value to the bound that the random start gives, so a
    direction that the search did not meet is within it, except with probability `MISSED`.

    Args:
        known: rows (m, n) that may lie near the largest eigenvector, such as the one of the last time and a
            gradient. The subspace gets them if the random start alone did not give the error asked for.
        tol: error that is enough, relative to the largest value.
        max_products: most products with one vector.
        max_basis: vectors in the subspace, each kept with its product.
        seed: of the random vector.
        stop: asked before every further product; where it says so, what was found is returned as it is.
        go_on: subspace of an earlier `search_top` of the same matrix, which is extended.
    """
    n = op.shape[0]
    known = fresh(op, 0, op.local_shape[0]) if known is None else known.to(dtype=op.dtype, device=op.device)
    if go_on is None:
        space, before = Subspace(op, max(max_basis, top + 4, len(known) + 4)), 0
        begin = fresh(op, 1, op.local_shape[0])
        random_vector(op, seed=seed, index=0, out=begin[0])
        space.add(begin)
        space.chain = space.count
    else:
        space, before = go_on, go_on.products
        space.op, space.count = op, go_on.chain
    most = min(max_products - len(known) + before, space.products + space.room - space.count - len(known))
    while True:
        theta, upper = float(space.ritz()[0][-1]), space.upper_bound()
        scale = float(np.abs(space.ritz()[0]).max())
        enough = upper - theta <= tol * max(abs(theta), FLOOR * scale)
        if enough or space.products >= most or (stop is not None and stop()):
            break
        if not space.add(space.AV[-1:].clone()):
            break
        space.chain = space.count
    if not enough and not (stop is not None and stop()):
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
        num_products=space.products - before,
        subspace=space,
        upper=upper,
    )


@fixed_operator
def track_top(
    op: LinearOperator,
    followed: Tensor,
    *,
    top: int = 1,
    tol: float = 0.05,
    max_products: int = 10,
    stop: Callable[[], bool] | None = None,
) -> TrackedEnds:
    """The `top` largest eigenpairs by Lanczos from the sum of earlier eigenvectors.

    The matrix has an eigenvalue within the error of the largest value. A search that starts orthogonal to an
    eigenvector does not meet it; `search_top` bounds such eigenvalues.

    Args:
        followed: rows (m, n), eigenvectors of the last time.
        tol: error that is enough, relative to the largest value.
        max_products: most products with one vector.
        stop: asked before every further product; where it says so, what was found is returned as it is.
    """
    space = Subspace(op, max(max_products, top + 4))
    space.add(followed.to(dtype=op.dtype, device=op.device).sum(dim=0, keepdim=True))
    while True:
        pairs = _Pairs(space, min(top, space.count), tol, bottom=False, seen=[])
        enough = space.count >= LEAST_TRACKED and bool(pairs.errors[0] <= pairs.limits(tol, math.inf)[0])
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


def _begin(op: LinearOperator, followed: Tensor | None, seed: int) -> Tensor:
    """One vector to begin with, (1, n): the sum of those that are followed, and a random one."""
    begin = fresh(op, 1, op.local_shape[0])
    random_vector(op, seed=seed, index=0, out=begin[0])
    if followed is None or not len(followed):
        return begin
    known = followed.to(begin).sum(dim=0, keepdim=True)
    if not float(norms(known[0])) > 0:  # zero, for example a zero gradient: only the random vector is used
        return begin
    return begin.mul_((RANDOM * norms(known[0]) / norms(begin[0])).to(begin)).add_(known)


class _Pairs:
    """Wanted Ritz pairs of a subspace: the largest first, then the smallest one.

    The largest has the error min(r, r²/gap), not less than what the last product has moved it. The smallest
    is usually the edge of a bulk, where the next one is unknown. Its error is r, but at least the change over
    the last products, and at least the tolerance, because a search that stops there has no better estimate.
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
            if space.count < space.op.shape[0]:  # a residual does not show an eigenvector that just came up
                before = np.linalg.eigvalsh(space.H[: m - 1, : m - 1])[-1]
                self.errors[0] = max(self.errors[0], theta[-1] - before)
        self.moved = np.abs(seen[-1] - seen[max(len(seen) - 1 - STEADY, 0)])
        self.full = space.count == space.op.shape[0]
        if bottom and not self.full:
            self.errors[-1] = max(self.sizes[-1], self.moved[1], tol * self.scale)

    def limits(self, tol: float, loose: float) -> np.ndarray:
        """Return the sufficient errors, (k,)."""
        first = np.arange(len(self.values)) == 0
        own = np.where(first, np.maximum(abs(self.values[0]), FLOOR * self.scale), self.scale)
        return np.where(self.is_end, tol * own, loose * self.scale if self.scale > 0 else math.inf)

    def reach(self, upper: float) -> None:
        """Let the error of the largest value reach up to a bound of all; a value beyond it keeps its own."""
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

    The gap is that between the last of them and the next Ritz value plus its residual.
    """
    theta, S = space.ritz()
    k, j = len(residuals), len(theta) - len(residuals) - 1
    if j < 0:
        return 0.0
    beyond = theta[j] + float(norms(space.residuals(theta[j : j + 1], S[:, j : j + 1]), dim=1)[0])
    size, gap = float(np.linalg.norm(residuals)), float(theta[-k] - beyond)
    return min(size / gap, 1.0) if gap > 0 else 1.0


def _best(theta: np.ndarray, S: np.ndarray, room: int, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose Ritz pairs to fill half of the subspace, mostly from the high end."""
    low = max(room // 8, 1)
    high = max(room // 2 - low, top + 1)
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
        rest = AX - self.AV.T @ add_up(self.V @ X)
        rest = X * (rest - self.V.T @ add_up(self.V @ rest))
        exact = add_up(torch.stack([inside[rows].double().sum() for rows in blocks]))
        samples = add_up(torch.stack([rest[rows].double().sum(0) for rows in blocks], dim=1))
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

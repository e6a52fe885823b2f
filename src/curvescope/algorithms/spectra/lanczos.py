"""Extreme eigenpairs of a symmetric operator.

The eigenvalues smallest in absolute value are the largest of the inverse.

The search for extreme eigenpairs runs on A⁻¹, each of whose products is a system solved by minimal residuals.
A vector v with ‖A⁻¹ v − μ v‖ ≤ r has, after one more solve w = A⁻¹ v, a residual of at most λ² r on A with
λ = 1 / μ; so the vectors are refined by one solve each, and their residuals are measured with A itself. A
system may be unsolvable because A is singular up to rounding, or has too many small eigenvalues too close to
zero. Then the result has the best vectors of A², marked as not resolved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.checks import (
    GIB,
    check_choice,
    check_count,
    check_symmetric,
    fixed_operator,
    relative_tolerance,
)
from curvescope.algorithms.spectra.krylov import Tridiagonals, lanczos
from curvescope.algorithms.spectra.restart import (
    Search,
    SearchResult,
    Which,
    filled,
    measured,
    rayleigh_ritz,
    solved_directly,
)
from curvescope.algorithms.systems.solve import solve
from curvescope.algorithms.vectors import (
    none_is_zero,
    on_all,
    orthonormalize,
    safe_vector_scale,
    vector_bytes,
)
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import Identity, LinearOperator, LowRank, as_columns
from curvescope.core.operator.kinds import like
from curvescope.core.result import Tabular
from curvescope.viz import estimates

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Eigenpairs", "Tridiagonals", "eigsh", "lanczos"]

DENSE_ROWS = 64  # operators up to this size are solved directly
BASIS_GIB = 8  # memory that the default basis may take
SPARE = 4  # basis vectors needed beyond k
SMALLEST_ROWS = 2048  # the same for the smallest eigenvalues: systems take more products than rows
MANY = 5  # factor on the default number of products for the smallest eigenvalues, which need solves


@dataclass(frozen=True)
class Eigenpairs(Tabular):
    """Extreme eigenvalues and eigenvectors, with the residuals that were measured.

    A symmetric operator has an eigenvalue within `residuals[i]` of `values[i]`.
    """

    values: np.ndarray  # (k,)
    vectors: Tensor | None  # (n, k) orthonormal columns on the operator's device; NumPy if v0 was
    residuals: np.ndarray  # (k,) ‖A v − λ v‖
    converged_mask: np.ndarray  # (k,) whether the residual is at most tol times the largest |eigenvalue| seen
    converged: bool  # all of them, and a search outside the vectors found nothing that belongs before them
    num_products: int
    tol: float
    which: str
    seed: int
    reason: str = ""  # why the smallest, which="SM", are not converged

    def table(self) -> Any:
        """One row per eigenvalue."""
        return {"value": self.values, "residual": self.residuals, "converged": self.converged_mask}

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot eigenvalues by number, with their residuals; hollow markers are not converged."""
        return estimates.eigenvalues(ax, self.values, self.residuals, self.converged_mask)


@fixed_operator
def eigsh(
    op: LinearOperator,
    k: int = 6,
    *,
    which: Which = "LA",
    tol: float | None = None,
    max_products: int | None = None,
    max_basis: int | None = None,
    vectors: bool = True,
    seed: int = 0,
    v0: Tensor | np.ndarray | None = None,
) -> Eigenpairs:
    """The k extreme eigenpairs of a symmetric operator, repeated eigenvalues as often as they occur.

    Lanczos with full reorthogonalization, thick restarts, and sweeps from new random vectors that find
    further copies of repeated eigenvalues. Operators with up to 64 rows, or no more rows than the basis, are
    written out and solved directly. The residuals are measured with k further products.

    The error of a value is at most its residual. `converged` also means that no eigenvalue lies beyond the
    returned ones by more than the tolerance. This is not proved: the probability to overlook one is at most
    1e-3 at each end, over the random start of the last sweep, for any spectrum and number of rows.

    Memory: max_basis + 1 vectors and what a product takes; k more when the residuals are measured, the
    products of the k vectors, and after that the vectors that are returned.

    Work beyond the products: a step reads its m vectors once and the converged ones twice. It reads all once
    more if their measured overlap is above 0.03 tol, which may happen if an eigenvalue is far larger than the
    remaining ones.

    Args:
        which: "LA" largest, returned descending; "SA" smallest, ascending; "LM" largest in absolute value,
            by it, descending; "BE" both ends, ascending, one more from the high end if k is odd; "SM"
            smallest in absolute value, by it, ascending: written out up to 2048 rows, beyond that as the
            largest of the inverse, see `smallest`. Their residuals are measured on the operator itself, and
            count as converged relative to the largest of the k, not of the operator: where they cannot be
            told from zero, `converged` is false and `reason` says why.
        tol: residual that counts as converged, relative to the largest |Ritz value| seen; 1e-8 in float64,
            1e-4 in float32 (about the square root of a rounding, so eigenvalues are good to its square).
            Eigenvalues nearer to each other than this count as equal.
        max_products: most products with one vector, at least 2k; 1000 + 50 k by default, and five times that
            for "SM". When they are used up, the current result is returned with `converged` false.
        max_basis: vectors in memory, at least k + 4; max(2k + 20, 80) by default, fewer if that is more
            than 8 GiB.
        vectors: If True, return the eigenvectors.
        v0: vectors to start from, (n,) or columns (n, m), of torch or NumPy: eigenvectors found before, of
            this operator or one near it, `eigsh(…, v0=before.vectors)`. Each that is an eigenvector is
            accepted after one product, one nearby after a few. The last sweep, which checks for missed
            eigenvalues, still starts from a random vector. It takes a few products if the wanted eigenvalues
            are well separated from the others, else as many as without v0.

    Returns:
        Eigenvectors are torch tensors in the operator's dtype and on its device, NumPy if v0 was.
    """
    check_symmetric(op, "eigsh")
    check_choice("which", which, get_args(Which))
    n, tol = op.shape[0], relative_tolerance(tol, op.dtype)
    k = check_count("k", k, at_least=1, at_most=n)
    limit = (1000 + 50 * k) * (MANY if which == "SM" else 1)
    if max_products is not None:
        limit = check_count("max_products", max_products, at_least=2 * k)
    least = min(k + SPARE, n)
    basis = basis_size(op, k) if max_basis is None else check_count("max_basis", max_basis, at_least=least)
    starts = None if v0 is None else _start_columns(op, v0)
    written = max(SMALLEST_ROWS if which == "SM" else DENSE_ROWS, basis)
    if n <= min(written, limit):
        found = solved_directly(op, k, which)
    elif which == "SM":
        found = smallest(op, k=k, tol=tol, max_basis=basis, limit=limit, seed=seed, starts=starts)
    else:
        search = Search(
            op, k=k, which=which, tol=tol, max_basis=basis, max_products=limit - k, seed=seed, starts=starts
        )
        search.run()
        found = measured(search)
    own = like(found.Y.clone().T, v0) if vectors else None  # a copy, so that the basis can be freed
    return _eigenpairs(found, own, tol, which, seed)


def _eigenpairs(
    found: SearchResult, vectors: Tensor | None, tol: float, which: Which, seed: int
) -> Eigenpairs:
    """Return the result with its convergence flags, and the reason if the smallest are not resolved."""
    values, residuals = found.values, found.residuals
    scale = (
        0.0 if which == "SM" else found.scale
    )  # the scale of the operator is no measure for its smallest eigenvalues
    mask = residuals <= tol * max(scale, float(np.abs(values).max()))
    converged = bool(mask.all()) and found.verified
    return Eigenpairs(
        values=values,
        vectors=vectors,
        residuals=residuals,
        converged_mask=mask,
        converged=converged,
        num_products=found.products,
        tol=tol,
        which=which,
        seed=seed,
        reason="" if converged or which != "SM" else unresolved(values, residuals, found.reason),
    )


def basis_size(op: LinearOperator, k: int) -> int:
    """Return the default number of basis vectors within the memory limit."""
    vector = vector_bytes(op)
    fitting = BASIS_GIB * GIB // vector - 1
    if fitting < min(k + SPARE, op.shape[0]):
        needed = (k + SPARE + 1) * vector / GIB
        raise UsageError(
            f"a basis of k + {SPARE} = {k + SPARE} vectors takes {needed:.1f} GiB, more than {BASIS_GIB} GiB",
            hint="pass max_basis to allow it, or ask for fewer eigenpairs",
        )
    return min(max(2 * k + 20, 80), fitting)


def _start_columns(op: LinearOperator, v0: Tensor | np.ndarray) -> Tensor:
    """Return the given start vectors as columns (n, m), none of them zero."""
    columns = as_columns(op, v0)
    if columns.shape[1] == 0 or not none_is_zero(columns):
        raise ShapeError(
            f"expected v0 as one vector ({op.shape[0]},) that is not zero, or columns of such, "
            f"got {tuple(v0.shape)}"
        )
    if not on_all(bool(torch.isfinite(columns).all()), op.device):
        raise ShapeError("expected a finite v0, got nan or inf")
    return columns


def deflate(op: LinearOperator, pairs: Eigenpairs | Tensor | np.ndarray) -> LinearOperator:
    """P A P with P = I − V Vᵀ, for orthonormal columns V (n, k): the eigenvalues of V become zero.

    With eigenvectors V it is A − V Λ Vᵀ; with approximate eigenvectors it is still symmetric, and positive
    semi-definite if A is. The removed part is known: tr A = Σ vᵢᵀ A vᵢ + tr P A P, and the values of `pairs`
    are those vᵢᵀ A vᵢ. Memory: k vectors. A product takes one product with A.

    Args:
        pairs: what `eigsh` found, or vectors (n,) or (n, k), which are made orthonormal.
    """
    check_symmetric(op, "deflate")
    vectors = pairs.vectors if isinstance(pairs, Eigenpairs) else pairs
    if vectors is None:
        raise UsageError("expected eigenpairs with vectors", hint="eigsh(…, vectors=True) returns them")
    V = as_columns(op, vectors).clone()
    if not bool(torch.isfinite(V).all()):
        raise UsageError("expected finite vectors to deflate, got nan or inf")
    if V.shape[1] > V.shape[0]:
        raise ShapeError(f"expected at most {V.shape[0]} vectors to deflate, got {V.shape[1]}")
    with op.frozen():  # all ranks compute the same bits inside
        R = orthonormalize(V).diagonal().abs() if V.shape[1] else torch.ones(0)
    if bool((100 * torch.finfo(op.dtype).eps * R.max() >= R).any()) if len(R) else False:
        raise UsageError("expected vectors that are independent, got one in the span of the others, or zero")
    P = Identity(op.shape[0], dtype=op.dtype, device=op.device) - LowRank(V)
    return P @ op @ P


INNER = 0.1  # tolerance of the solves, relative to that of the search
RESERVE = 5  # one in so many products is reserved for the fallback if systems cannot be solved
TIGHTEST = 50.0  # smallest tolerance of a solve, in roundings


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
) -> SearchResult:
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
) -> SearchResult:
    """The search on the inverse, one solve more for each vector, and residuals on A."""
    search = Search(
        inverting,
        k=k,
        which="LM",
        tol=tol,
        max_basis=max_basis,
        max_products=inverting.limit,  # solves use up this limit first
        seed=seed,
        starts=starts,
    )
    search.run()
    W = inverting @ filled(search).T
    W = W * (safe_vector_scale(W) or 1.0)
    orthonormalize(W)
    found = _on(inverting.op, W.T.contiguous(), inverting.products, verified=search.verified)
    inverting.products = found.products
    return found


def _on(op: LinearOperator, Y: Tensor, products: int, *, verified: bool, reason: str = "") -> SearchResult:
    """Ritz pairs of A on the rows of Y (k, n)."""
    values, residuals = rayleigh_ritz(op, Y, "SM", factor=safe_vector_scale(op @ Y[0]) or 1.0)
    return SearchResult(
        values, Y, residuals, float(np.abs(values).max()), verified, products + len(Y) + 1, reason
    )


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
) -> SearchResult:
    """The vectors of the smallest eigenvalues of A² that the products left allow."""
    left = max((limit - used - k - 1) // 2, 1)
    search = Search(op @ op, k=k, which="SA", tol=tol, max_basis=max_basis, max_products=left, seed=seed)
    search.run()
    return _on(op, filled(search).clone(), used + 2 * search.products, verified=False, reason=reason)


def unresolved(values: np.ndarray, residuals: np.ndarray, reason: str) -> str:
    """Return the reason why the smallest eigenvalues are not resolved, in a sentence."""
    found = (
        f"not resolved: |λ| is at most {float(np.abs(values).max()):.2g}, with residuals of up to "
        f"{float(residuals.max()):.2g}"
    )
    if not reason and (residuals >= np.abs(values)).any():
        reason = "some cannot be told from zero"
    return f"{found}; {reason}" if reason else found

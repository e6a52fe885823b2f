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
    holds_on_all_ranks,
    none_is_zero,
    orthonormalize,
    safe_vector_scale,
    vector_bytes,
)
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import Identity, LinearOperator, LowRank, as_columns
from curvescope.core.operator.kinds import as_kind
from curvescope.core.result import Tabular
from curvescope.viz import estimates

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Eigenpairs", "Tridiagonals", "eigsh", "lanczos"]

DENSE_ROWS = 64  # operators up to this size are solved directly
BASIS_GIB = 8  # memory that the default basis may take
SPARE = 4  # basis vectors needed beyond k
SMALLEST_ROWS = 2048  # the same for the smallest eigenvalues: systems take more products than rows
INVERSE_FACTOR = 5  # factor on the default number of products for the smallest eigenvalues, which need solves


@dataclass(frozen=True)
class Eigenpairs(Tabular):
    """Extreme eigenvalues and eigenvectors, with the residuals that were measured.

    A symmetric operator has an eigenvalue within `residuals[i]` of `values[i]`.
    """

    values: np.ndarray  # (k,)
    vectors: Tensor | None  # (n, k) orthonormal columns on the operator's device; NumPy if v0 was
    residuals: np.ndarray  # (k,) ‖A v − λ v‖
    converged_mask: np.ndarray  # (k,) whether the residual is at most tol times the largest |eigenvalue| seen
    converged: bool  # True if all are, and a search outside the vectors found no better eigenvalue
    num_products: int
    tol: float
    which: str
    seed: int
    reason: str = ""  # reason why the smallest, which="SM", are not converged

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
    """The k extreme eigenpairs of a symmetric operator, with repeated eigenvalues as often as they occur.

    The method is Lanczos with full reorthogonalization, thick restarts, and sweeps from new random vectors
    that find further copies of repeated eigenvalues. Operators with up to 64 rows, or no more rows than the
    basis, are solved as dense matrices. The residuals are measured with k further products.

    The error of a value is at most its residual. `converged` also means that no eigenvalue lies beyond the
    returned ones by more than the tolerance. This is not proved: the probability to overlook one is at most
    1e-3 at each end, over the random start of the last sweep, for any spectrum and number of rows.

    Memory: max_basis + 1 vectors and the memory of a product; k more for the residuals, and afterwards for
    the returned vectors.

    Besides the products, a step reads its m vectors once and the converged ones twice. It reads all of them
    once more if their measured overlap is above 0.03 tol, which may happen if one eigenvalue is far larger
    than the others.

    Args:
        which: "LA": largest, in descending order. "SA": smallest, ascending. "LM": largest in absolute value,
            descending in it. "BE": both ends, ascending, one more from the high end if k is odd. "SM":
            smallest in absolute value, ascending in it, from the dense matrix up to 2048 rows, and for more
            rows as the largest of the inverse, see `smallest`. For "SM" the tolerance is relative to the
            largest of the k values, not of the operator. If they cannot be distinguished from zero,
            `converged` is false and `reason` says why.
        tol: Residual that counts as converged, relative to the largest |Ritz value| seen; 1e-8 in float64,
            1e-4 in float32 (about the root of machine precision, so eigenvalues are accurate to its square).
            Eigenvalues closer to each other than this count as equal.
        max_products: Largest number of products with one vector, at least 2k; by default 1000 + 50 k, and
            five times that for "SM". When they are used up, the current result is returned, with `converged`
            false.
        max_basis: Number of vectors in memory, at least k + 4; by default max(2k + 20, 80), or fewer if these
            need more than 8 GiB.
        vectors: If True, return the eigenvectors.
        v0: Start vectors, (n,) or columns (n, m), of torch or NumPy, such as eigenvectors of a similar
            operator: `eigsh(…, v0=before.vectors)`. The search accepts an exact eigenvector after one
                product,
            and an approximate one after a few. The last sweep, which checks for missed eigenvalues, still
            starts from a random vector. It takes a few products if the wanted eigenvalues are well separated
            from the others, and otherwise as many as without v0.

    Returns:
        Eigenpairs, with vectors as tensors in the operator's dtype and on its device, or NumPy arrays if v0
        is.
    """
    check_symmetric(op, "eigsh")
    check_choice("which", which, get_args(Which))
    n, tol = op.shape[0], relative_tolerance(tol, op.dtype)
    k = check_count("k", k, at_least=1, at_most=n)
    limit = (1000 + 50 * k) * (INVERSE_FACTOR if which == "SM" else 1)
    if max_products is not None:
        limit = check_count("max_products", max_products, at_least=2 * k)
    smallest_basis = min(k + SPARE, n)
    basis = (
        basis_size(op, k)
        if max_basis is None
        else check_count("max_basis", max_basis, at_least=smallest_basis)
    )
    starts = None if v0 is None else _start_columns(op, v0)
    written = max(SMALLEST_ROWS if which == "SM" else DENSE_ROWS, basis)
    if n <= min(written, limit):
        result = solved_directly(op, k, which)
    elif which == "SM":
        result = smallest(op, k=k, tol=tol, max_basis=basis, limit=limit, seed=seed, starts=starts)
    else:
        search = Search(
            op, k=k, which=which, tol=tol, max_basis=basis, max_products=limit - k, seed=seed, starts=starts
        )
        search.run()
        result = measured(search)
    eigenvectors = (
        as_kind(result.Y.clone().T, v0) if vectors else None
    )  # a copy, so that the basis can be freed
    return _eigenpairs(result, eigenvectors, tol, which, seed)


def _eigenpairs(
    result: SearchResult, vectors: Tensor | None, tol: float, which: Which, seed: int
) -> Eigenpairs:
    """Return the result with its convergence flags, and the reason if the smallest are not resolved."""
    values, residuals = result.values, result.residuals
    scale = (
        0.0 if which == "SM" else result.scale
    )  # the scale of the operator says nothing about its smallest eigenvalues
    mask = residuals <= tol * max(scale, float(np.abs(values).max()))
    converged = bool(mask.all()) and result.verified
    return Eigenpairs(
        values=values,
        vectors=vectors,
        residuals=residuals,
        converged_mask=mask,
        converged=converged,
        num_products=result.products,
        tol=tol,
        which=which,
        seed=seed,
        reason="" if converged or which != "SM" else unresolved(values, residuals, result.reason),
    )


def basis_size(op: LinearOperator, k: int) -> int:
    """Return the default number of basis vectors within the memory limit."""
    vector = vector_bytes(op)
    fitting = BASIS_GIB * GIB // vector - 1
    if fitting < min(k + SPARE, op.shape[0]):
        gib = (k + SPARE + 1) * vector / GIB
        raise UsageError(
            f"a basis of k + {SPARE} = {k + SPARE} vectors takes {gib:.1f} GiB, more than {BASIS_GIB} GiB",
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
    if not holds_on_all_ranks(bool(torch.isfinite(columns).all()), op.device):
        raise ShapeError("expected a finite v0, got nan or inf")
    return columns


def deflate(op: LinearOperator, pairs: Eigenpairs | Tensor | np.ndarray) -> LinearOperator:
    """P A P with P = I − V Vᵀ, for orthonormal columns V (n, k): the eigenvalues of V become zero.

    For eigenvectors V the result is A − V Λ Vᵀ. For approximate eigenvectors it is still symmetric, and
    positive semi-definite if A is. The values of `pairs` are vᵢᵀ A vᵢ, so that tr A = Σ vᵢᵀ A vᵢ + tr P A P.
    It needs the memory of k vectors, and one product with A per product.

    Args:
        pairs: Result of `eigsh`, or vectors (n,) or (n, k), which are orthonormalized.
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


INNER_TOL = 0.1  # tolerance of the solves, relative to that of the search
RESERVED_SHARE = 5  # one in 5 products is reserved for the fallback if systems cannot be solved
MIN_INNER_TOL = 50.0  # smallest tolerance of a solve, in roundings


class _NotSolved(Exception):
    """A system with A was not solved to its tolerance."""


class _Inverting(LinearOperator):
    """A⁻¹ by minimal residuals; raises if a system is not solved within the remaining products."""

    symmetric = True

    def __init__(self, op: LinearOperator, tol: float, limit: int):
        self.op, self.tol, self.limit, self.products = op, tol, limit, 0
        self.shape, self.dtype, self.device, self.shards = op.shape, op.dtype, op.device, op.shards

    def _matmat(self, V: Tensor) -> Tensor:
        products_left = (self.limit - self.products) // V.shape[1]
        if products_left < 2:
            raise _NotSolved(f"{self.products} products were not enough")
        solution = solve(self.op, V, method="minres", tol=self.tol, max_products=products_left)
        self.products += solution.num_products
        if not solution.converged:
            residual = float(np.max(solution.residual))
            raise _NotSolved(f"a system was solved to {residual:.1g} only: {solution.reason}")
        return solution.x


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
        tol: Target residual on A, relative to the largest of the k values.
        limit: Largest number of products with A.
    """
    eps = torch.finfo(op.dtype).eps
    options = {"k": k, "max_basis": max_basis, "seed": seed}
    inverting = _Inverting(op, max(INNER_TOL * tol, MIN_INNER_TOL * eps), limit - limit // RESERVED_SHARE)
    try:
        result = _searched(inverting, tol=tol, starts=starts, **options)
    except _NotSolved as reason:
        return _smallest_of_square(op, inverting.products, limit, str(reason), tol=tol, **options)
    lowest, highest = float(np.abs(result.values[0])), float(np.abs(result.values[-1]))
    if (result.residuals <= tol * highest).all() or lowest == 0:
        return result
    # the tolerance of the search is relative to the smallest value, `tol` to the largest
    tight = max(tol * lowest / highest, MIN_INNER_TOL * eps)
    inverting.tol = max(INNER_TOL * tight, MIN_INNER_TOL * eps)
    try:
        return _searched(inverting, tol=tight, starts=result.Y.T, **options)
    except _NotSolved as reason:
        return result._replace(products=inverting.products, reason=str(reason))


def _searched(
    inverting: _Inverting, *, k: int, tol: float, max_basis: int, seed: int, starts: Tensor | None
) -> SearchResult:
    """Search on the inverse, refine each vector by one more solve, and measure residuals on A."""
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
    result = _ritz_pairs(inverting.op, W.T.contiguous(), inverting.products, verified=search.verified)
    inverting.products = result.products
    return result


def _ritz_pairs(
    op: LinearOperator, Y: Tensor, products: int, *, verified: bool, reason: str = ""
) -> SearchResult:
    """Compute Ritz pairs of A on the rows of Y (k, n)."""
    values, residuals = rayleigh_ritz(op, Y, "SM", factor=safe_vector_scale(op @ Y[0]) or 1.0)
    return SearchResult(
        values, Y, residuals, float(np.abs(values).max()), verified, products + len(Y) + 1, reason
    )


def _smallest_of_square(
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
    """Compute vectors of the smallest eigenvalues of A² with the remaining products."""
    num_products = max((limit - used - k - 1) // 2, 1)
    search = Search(
        op @ op, k=k, which="SA", tol=tol, max_basis=max_basis, max_products=num_products, seed=seed
    )
    search.run()
    return _ritz_pairs(op, filled(search).clone(), used + 2 * search.products, verified=False, reason=reason)


def unresolved(values: np.ndarray, residuals: np.ndarray, reason: str) -> str:
    """Describe in one sentence why the smallest eigenvalues are not resolved."""
    message = (
        f"not resolved: |λ| is at most {float(np.abs(values).max()):.2g}, with residuals of up to "
        f"{float(residuals.max()):.2g}"
    )
    if not reason and (residuals >= np.abs(values)).any():
        reason = "some cannot be distinguished from zero"
    return f"{message}; {reason}" if reason else message

"""Extreme eigenpairs of a symmetric operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.checks import (
    GIB,
    check_choice,
    check_count,
    check_symmetric,
    of_one_matrix,
    relative_tolerance,
)
from curvescope.algorithms.spectra.krylov import Tridiagonals, lanczos
from curvescope.algorithms.spectra.restart import Search, Which
from curvescope.algorithms.spectra.ritz import Found, measured, solved_directly
from curvescope.algorithms.spectra.smallest import smallest, unresolved
from curvescope.algorithms.vectors import none_is_zero, on_all, vector_bytes
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import LinearOperator, as_columns
from curvescope.core.operator.kinds import like
from curvescope.core.result import Result
from curvescope.viz import estimates

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = ["Eigenpairs", "Tridiagonals", "eigsh", "lanczos"]

DENSE_ROWS = 64  # operators up to this size are written out
BASIS_GIB = 8  # memory that the default basis may take
SPARE = 4  # basis vectors needed beyond k
SMALLEST_ROWS = 2048  # and up to this one for the smallest eigenvalues: systems take more products than rows
MANY = 5  # times as many products for the smallest eigenvalues, each of which solves systems


@dataclass(frozen=True)
class Eigenpairs(Result):
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

    def to_frame(self) -> pd.DataFrame:
        """One row per eigenvalue."""
        import pandas as pd

        columns = {"value": self.values, "residual": self.residuals, "converged": self.converged_mask}
        return pd.DataFrame(columns)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Eigenvalues by number, with their residuals; hollow where they are not converged."""
        return estimates.eigenvalues(ax, self.values, self.residuals, self.converged_mask)


@of_one_matrix
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

    Lanczos with full reorthogonalization, thick restarts, and sweeps from fresh random vectors that look
    for what one Krylov space cannot hold. Operators with up to 64 rows, or no more rows than the basis,
    are written out and solved directly. The residuals are measured with k further products.

    A pair is wrong by at most its residual; what `converged` adds is that no eigenvalue lies beyond those
    found by more than the tolerance. That is not proved but overlooked with a probability of at most 1e-3 at
    each end, over the random start of the last sweep, whatever the spectrum and the number of rows.

    Memory: max_basis + 1 vectors and what a product takes; k more when the residuals are measured, the
    products of the k vectors, and after that the vectors that are returned.

    Work beyond the products: a step reads the m vectors it has once, those found twice, and all once more
    where the measured overlap with them is above 0.03 tol, as it may be when an eigenvalue is far larger than
    what is left.

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
        max_products: most products with one vector, at least 2k; 1000 + 50 k by default, and five times
            that for "SM". When they are used up, what there is is returned with `converged` false.
        max_basis: vectors in memory, at least k + 4; max(2k + 20, 80) by default, fewer if that is more
            than 8 GiB.
        vectors: whether to return the eigenvectors.
        v0: vectors to start from, (n,) or columns (n, m), of torch or NumPy: eigenvectors found before, of
            this operator or one near it, `eigsh(…, v0=before.vectors)`. Each that is an eigenvector is
            accepted after one product, one nearby after a few. The last sweep, which looks for what they
            miss, still starts from a random vector: it takes a few products where the wanted eigenvalues
            stand apart from the others, and as many as without v0 where they do not.

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
    own = like(found.Y.clone().T, v0) if vectors else None  # without the rest of the basis
    return _eigenpairs(found, own, tol, which, seed)


def _eigenpairs(found: Found, vectors: Tensor | None, tol: float, which: Which, seed: int) -> Eigenpairs:
    """The result: what is converged, and why the smallest are not."""
    values, residuals = found.values, found.residuals
    scale = 0.0 if which == "SM" else found.scale  # what the smallest are small in is no measure of them
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
    """Default number of basis vectors, within the memory it may take."""
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
    """The given start vectors as columns (n, m), none of them zero."""
    columns = as_columns(op, v0)
    if columns.shape[1] == 0 or not none_is_zero(columns):
        raise ShapeError(
            f"expected v0 as one vector ({op.shape[0]},) that is not zero, or columns of such, "
            f"got {tuple(v0.shape)}"
        )
    if not on_all(bool(torch.isfinite(columns).all()), op.device):
        raise ShapeError("expected a finite v0, got nan or inf")
    return columns

"""Vector algebra of the algorithms: random vectors, projections, rotations.

An algorithm keeps its vectors as rows (m, n), or columns (n, k) for a product. It touches their entries only
through these functions, those of `accurate_sums`, and steps that work entry by entry (`chunks`). If vectors
are sharded over ranks (`core.ranks.shard_layout`), only these functions handle it.

Long vectors are processed in parts, so that several steps use a part while it is in the cache. These
functions allocate no memory of the length of a vector, because touching new memory costs more than computing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.accurate_sums import (
    CPU_CHUNK,
    DotSum,
    chunks,
    dots,
    inner,
    parts,
    sum_over_ranks,
    summing_dtype,
    to_numpy,
)
from curvescope.algorithms.krylov_storage import SplitBasis
from curvescope.core.errors import CurvescopeError
from curvescope.core.operator import LinearOperator
from curvescope.core.ranks import shared_errors
from curvescope.core.ranks.shard_layout import VectorShard, current_shard_group
from curvescope.core.seeds import drawn_on, generator, write
from curvescope.kernels import projection

DRAWN = 2**20  # random numbers per call, a multiple of the sixteen that are drawn together
PASSES = 5  # largest number of Gram–Schmidt passes; a vector that still shrinks lies in the basis's span
OVERLAP_ROUNDINGS = 4.0  # overlap, in roundings, that is always allowed for a long vector
EXACT_ROUNDINGS = 20.0  # a tolerance below this many roundings needs pairwise sums
MAX_OVERLAP = 0.03  # largest overlap, in square roots of a rounding
MAX_OVERLAP_LOOSE = (
    0.3  # the same on a GPU if only eigenvalues are needed: a third fewer passes over the basis
)
COMFORT = {
    torch.float64: 100,
    torch.float32: 8,
}  # decades around one in which squares and products are in range


class Remainder(NamedTuple):
    """Remainder of a vector outside a basis of m rows."""

    coefficients: np.ndarray  # (m,) subtracted coefficients
    norm: float  # norm of the remainder; zero if the vector lies in the span
    overlap: np.ndarray  # (m,) measured inner products of the basis with the remainder
    passes: int = 0  # passes over the basis that subtracted something


def fresh(like: LinearOperator | Tensor, *shape: int) -> Tensor:
    """Allocate vectors of the same dtype and device."""
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def random_vector(op: LinearOperator, *, seed: int, index: int, out: Tensor) -> None:
    """Overwrite `out` (n,) by the Gaussian vector of (seed, index), drawn as `core.seeds.probes` are."""
    n = op.shape[1]
    source = generator(seed, index, device=drawn_on(n, out.device))
    lengths = (min(DRAWN, n - start) for start in range(0, n, DRAWN))
    options = {"generator": source, "dtype": torch.float32, "device": source.device}
    write((torch.randn(length, **options) for length in lengths), out, columns_of(op))


def columns_of(op: LinearOperator) -> VectorShard | None:
    """Return this rank's entries of the vectors that an operator takes; None if it has all."""
    return None if op.shards is None else op.shards[1]


def own_entries(op: LinearOperator, X: Tensor) -> Tensor:
    """Return this rank's rows of X (n, …)."""
    return X if op.shards is None else X[op.shards[0].positions().to(X.device)]


def vector_bytes(op: LinearOperator) -> int:
    """Return the bytes of a vector of an operator; of this rank's shard if it is sharded."""
    ranks = 1 if op.shards is None else op.shards[0].spread.ranks
    return max(1, -(-max(op.shape) // ranks) * torch.finfo(op.dtype).bits // 8)


def holds_on_all_ranks(holds: bool, device: torch.device) -> bool:
    """Return True if a condition on vectors holds on every rank over which they are sharded."""
    group = current_shard_group()
    return holds if group is None else group.all(holds, device)


def none_is_zero(columns: Tensor) -> bool:
    """Return True if every column (n, k) has an entry that is not zero."""
    return bool((sum_over_ranks((columns != 0).sum(dim=0, dtype=torch.float32)) > 0).all())


def factors(values: Tensor, like: Tensor) -> Tensor | float:
    """Convert one factor per column, (k,), for `add_multiple`: a plain number for a single column."""
    return float(values) if len(values) == 1 else values.to(like.dtype)


def add_multiple(y: Tensor, x: Tensor, c: Tensor | float) -> Tensor:
    """Add x c to y in place, for columns (m, k) and `factors` c."""
    return y.addcmul_(x, c) if isinstance(c, Tensor) else y.add_(x, alpha=c)


def orthonormalize(Y: Tensor) -> Tensor:
    """Y = Q R for columns (n, k), n ≥ k: R (k, k), with Q in the place of Y.

    It works on parts of rows: Yᵢ = Qᵢ Rᵢ, and the stacked Rᵢ are P R, so that Q has the parts Qᵢ Pᵢ. LAPACK
    with several threads would need the memory of sixteen vectors for all rows at once. With sharded vectors,
    each rank does the same with its rows.
    """
    spread = current_shard_group()
    if spread is None or spread.ranks == 1:
        return _orthonormalized(Y)
    has_few_rows, k = len(Y) < Y.shape[1], Y.shape[1]  # few rows are their own Rᵢ
    triangle = Y.clone() if has_few_rows else _orthonormalized(Y)
    triangles = triangle.new_zeros(spread.ranks, k, k)
    triangles[spread.rank, : len(triangle)] = triangle
    P, R = torch.linalg.qr(spread.sum(triangles).view(-1, k))
    rotation = P.view(spread.ranks, k, k)[spread.rank, : len(triangle)]
    Y.copy_(rotation if has_few_rows else Y @ rotation)
    return R


def _orthonormalized(Y: Tensor) -> Tensor:
    """Orthonormalize this rank's rows only."""
    k = Y.shape[1]
    rows = Y.tensor_split(max(1, len(Y) // max(CPU_CHUNK, k))) if Y.device.type == "cpu" else (Y,)
    triangles = []
    for part in rows:
        Q, R = torch.linalg.qr(part)
        part.copy_(Q)
        triangles.append(R)
    if len(rows) == 1:
        return triangles[0]
    P, R = torch.linalg.qr(torch.cat(triangles))
    for part, rotation in zip(rows, P.split(k), strict=True):
        part.copy_(part @ rotation)
    return R


def orthogonalize(
    basis: Tensor | SplitBasis,
    w: Tensor,
    *,
    out: Tensor | None = None,
    expected: np.ndarray | None = None,
    tol: float = 0.0,
    semi: float = MAX_OVERLAP,
) -> Remainder:
    """Project w (n,) onto the complement of the orthonormal rows of a basis (m, n), in place or into `out`.

    This is repeated classical Gram–Schmidt: each pass over the basis subtracts coefficients and measures the
    remaining overlap. The first pass subtracts the `expected` coefficients, known from a recurrence;
    otherwise they are measured first, which reads the basis once more. A long vector is finished if its
    overlap, relative to its norm, is at most `tol` and `semi` roots of a rounding, or a few roundings. For
    other vectors two passes suffice, unless w lies in the span up to rounding. With an overlap of up to the
    root of a rounding, eigenvalues of a projection are exact up to rounding (Simon 1984), but residuals
    change by as much as the overlap.
    """
    out = w if out is None else out
    if expected is None:
        assert isinstance(basis, Tensor)  # a split basis comes with expected coefficients
        overlap = dots(basis, w)
    else:
        overlap = torch.as_tensor(expected).to(dtype=summing_dtype(w.device), device=w.device)
    found = overlap.cpu()
    coefficients, before = torch.zeros_like(found), math.inf
    eps = torch.finfo(w.dtype).eps
    long = _full_length(w) > CPU_CHUNK
    tolerance = max(OVERLAP_ROUNDINGS * eps, min(tol, semi * eps**0.5)) if long else 0.0
    is_guessed = expected is not None
    exact = w.dtype == torch.float32 and long and tolerance < EXACT_ROUNDINGS * eps
    for pass_number in range(PASSES + is_guessed):
        coefficients += found
        sums = _subtract(basis, overlap, w if pass_number == 0 else out, out, exact=exact)
        host = sums.cpu()  # the only synchronization with the GPU in a pass
        rest, found = float(host[0].sqrt()), host[1:].clone()
        overlap = found if sums is host else sums[1:].clone()  # aligned: bits of products depend on it
        settled = pass_number > is_guessed and rest >= 0.5 * before
        if settled or float(found.norm()) <= tolerance * rest or math.isnan(rest):
            return Remainder(to_numpy(coefficients), rest, to_numpy(found), pass_number + 1)
        before = rest
    return Remainder(to_numpy(coefficients), 0.0, to_numpy(found), PASSES + is_guessed)


def _full_length(w: Tensor) -> int:
    """Return the number of entries of a vector over all ranks."""
    group = current_shard_group()
    return len(w) if group is None else int(group.sum(torch.tensor(float(len(w)), device=w.device)))


def _subtract(
    basis: Tensor | SplitBasis, coefficients: Tensor, w: Tensor, out: Tensor, *, exact: bool
) -> Tensor:
    """out = w − basisᵀ coefficients: (1 + m,) its square, and its inner products with the basis.

    With `exact`, and always on a GPU with Triton, float32 entries are summed pairwise; otherwise errors reach
    1e-5 of the norm.
    """
    near = basis if isinstance(basis, Tensor) else basis.near
    if len(near) and near.stride(1) == 1 and out.stride(0) == 1 and projection.in_triton(w, near, out):
        return sum_over_ranks(_subtract_in_triton(basis, coefficients, w, out))
    c, squares = coefficients.to(w.dtype), DotSum(out)
    total = torch.zeros_like(coefficients)
    for p in parts(len(w), w.device, width=max(1, len(coefficients) // 4) if exact else 1):
        rows, x = basis[:, p] if isinstance(basis, Tensor) else basis.part(p), out[p]
        (x if w is out else x.copy_(w[p])).addmv_(rows.T, c, alpha=-1)  # w may be a column, strided
        squares.add(x)
        total += (rows * x).sum(dim=1) if exact else rows @ x
    return sum_over_ranks(torch.cat([squares.total[None], total]))


def _subtract_in_triton(basis: Tensor | SplitBasis, c: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """Compute `_subtract` in one pass over the basis, before the sum over ranks."""
    if isinstance(basis, Tensor):
        return projection.subtract_projection(w, basis, None, c, out=out)
    sums, c = c.new_zeros(len(c) + 1), basis.near_first(c)
    for p, far in basis.far.streamed():
        sums += projection.subtract_projection(w[p], basis.near[:, p], far, c, out=out[p])
    return torch.cat([sums[:1], basis.in_order(sums[1:])])


def three_terms(product: Tensor, q: Tensor, before: Tensor, beta: float) -> tuple[float, float]:
    """Overwrite `before` by product − α q − β before with α = q · product: α and the norm of the result."""
    alpha, squares = float(inner(q, product)), DotSum(q)
    for x, y, z in chunks(before, product, q):
        x.mul_(-beta).add_(y) if beta else x.copy_(y)
        x.sub_(z, alpha=alpha)
        squares.add(x)
    return alpha, float(squares.root())


def rotate(rows: Tensor, S: np.ndarray) -> None:
    """Overwrite the first p rows of a basis (m, n) by Sᵀ rows for S (m, p), without a second copy of it."""
    R = torch.as_tensor(np.ascontiguousarray(S.T)).to(rows.dtype).to(rows.device)
    for p in parts(rows.shape[1], rows.device):
        rows[: R.shape[0], p] = R @ rows[:, p]


def safe_vector_scale(product: Tensor) -> float:
    """Return a power of two that scales the entries of a product, (n,) or (n, k), to about one.

    It is 1 unless the largest entry is many decades away from one, and 0 if all of them are zero.
    Multiplication by it is exact.
    """
    ends = (float(abs(end)) for (part,) in chunks(product) if part.numel() for end in torch.aminmax(part))
    largest, group = max(ends, default=0.0), current_shard_group()
    largest = largest if group is None else group.max(largest, product.device)
    if largest == 0:
        return 0.0
    if not math.isfinite(largest) or abs(math.log10(largest)) <= COMFORT[product.dtype]:
        return 1.0
    limit = 1000 if product.dtype == torch.float64 else 120
    return 2.0 ** max(-limit, min(limit, -math.frexp(largest)[1]))


def check_finite(*values: float | np.ndarray) -> None:
    """Raise, on every rank in step, if a number that came out of a product is nan or infinite."""
    with shared_errors():
        if not all(np.isfinite(value).all() for value in values):
            raise CurvescopeError(
                "a product of the operator is not finite", hint="look for nan or inf in op @ v"
            )
